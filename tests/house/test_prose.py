"""The user's pages are short, and can be read by people whose first language is not English."""

from __future__ import annotations

import re

import pytest

from tests.pages import DOCS, pages

# Reference is looked up and not read: its sentences may be longer.
REFERENCE = ("wire.md", "graphs.md", "limitations.md", "mathematics.md", "reference/")
USERS = [page for page in pages() if not page.removeprefix("docs/").startswith(REFERENCE)]
MOST_WORDS_A_SENTENCE = 40
MOST_WORDS_OF_ALL_PAGES = 30_000
LONGEST_CODE_LINE = 80

MARKER = re.compile(r"\s*(?:[-*] |\d+\. |#+ |> )")


def code_and_texts(text: str) -> tuple[list[str], list[str]]:
    """Return a page's lines of code, and its texts: paragraphs, items, headings, cells."""
    code: list[str] = []
    texts = [""]
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced:
            code.append(line)
        elif line.startswith("    ") and not texts[-1]:
            code.append(line[4:])
        elif not line.strip() or line.startswith(":::"):
            texts.append("")
        elif line.startswith("|"):
            texts += [*line.strip("|").split(" | "), ""]
        elif MARKER.match(line):
            texts.append(MARKER.sub("", line, count=1))
        else:
            texts[-1] += f" {line}"
    return code, texts


def sentences(text: str) -> list[str]:
    """Return a text's sentences, in which a link is its words and inline code is one word."""
    text = re.sub(r"`[^`]+`", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.split(r"(?<=[.!?])[)\"*_]*\s+", text)


def long_sentences(text: str) -> list[str]:
    """Return the sentences of a page that have too many words."""
    _, texts = code_and_texts(text)
    found = [sentence for part in texts for sentence in sentences(part)]
    return [said for said in found if len(said.split()) > MOST_WORDS_A_SENTENCE]


def long_code(text: str) -> list[str]:
    """Return the lines of a page's code that do not fit on a narrow screen."""
    code, _ = code_and_texts(text)
    return [line for line in code if len(line) > LONGEST_CODE_LINE]


@pytest.mark.parametrize("page", USERS)
def test_sentences_can_be_read_at_once(page: str) -> None:
    assert long_sentences((DOCS.parent / page).read_text()) == []


@pytest.mark.parametrize("page", USERS)
def test_code_fits_on_a_narrow_screen(page: str) -> None:
    assert long_code((DOCS.parent / page).read_text()) == []


def test_the_pages_can_be_read_in_a_day() -> None:
    num_words = {page: len((DOCS.parent / page).read_text().split()) for page in pages()[1:]}
    assert sum(num_words.values()) <= MOST_WORDS_OF_ALL_PAGES, num_words


def test_what_is_too_long_is_seen() -> None:
    words, line = "word " * MOST_WORDS_A_SENTENCE, "x" * (LONGEST_CODE_LINE + 1)
    page = (
        f"{words.strip()}.\n\n- An [item](a.md). {words}more\n\n| {words}| {words}`a b`. c |\n\n"
        f"```python\n{line}\n{words}more\n```\n\n    {line}\n    {line[1:]}\n"
    )
    assert [said.split()[-1] for said in long_sentences(page)] == ["more", "code."]
    assert len(long_code(page)) == 3
