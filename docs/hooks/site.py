"""What the site has beside its pages: llms.txt, every page with its first sentence, for programs.

Source: https://llmstxt.org for its form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
# A paragraph of text: no heading, table, list, fence, picture or directive, and not indented.
TEXT = re.compile(r"(?=[A-Z`\[])[^\n].*", re.DOTALL)
SENTENCE = re.compile(r".+?[.:!?](?=\s|$)")

_nav: Any = None


def on_nav(nav: Any, **_: Any) -> Any:
    """Keep the pages in their order until they have titles."""
    global _nav
    _nav = nav
    return nav


def on_post_build(config: Any) -> None:
    """Write llms.txt beside the pages."""
    text = "\n".join([f"# {config.site_name}", "", f"> {config.site_description}.", *_lines(_nav)])
    (Path(config.site_dir) / "llms.txt").write_text(f"{text}\n")


def _lines(nav: Any) -> Iterator[str]:
    for item in nav.items:
        if item.is_section:
            yield from ("", f"## {item.title}", "")
            yield from (_line(page) for page in item.children)
        else:
            yield from ("", _line(item))


def _line(page: Any) -> str:
    says = first_sentence(page.markdown)
    return f"- [{page.title}]({page.url})" + (says and f": {says}")


def first_sentence(markdown: str) -> str:
    """Return the first sentence of a page's text, on one line."""
    paragraphs = re.split(r"\n\s*\n", re.sub(r"^```.*?^```$", "", markdown, flags=re.M | re.S))
    text = next((part for part in paragraphs if TEXT.match(part)), "")
    plain = LINK.sub(r"\1", " ".join(text.split()))
    found = SENTENCE.match(plain)
    return found[0].rstrip(":") if found else plain
