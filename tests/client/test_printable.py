"""Text from the other side, before a terminal or a log sees it."""

from __future__ import annotations

import logging

import pytest

from gradbox import GradboxError, JobState, OutOfMemory
from gradbox.cli.output import complain, say_table
from gradbox.printable import printable
from gradbox.progress import ProgressBar
from tests.client.wires import answer, client_of, job_view, problem

HOSTILE = "a\x1b]0;title\x07\r\n\u202eb\x9b\u2028\ud800"


def shows_nothing_hidden(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


def test_what_prints_stays_as_it_is() -> None:
    plain = "∂L/∂θ, Ångström, 模型, 😀, C:\\new"
    assert printable(plain) == plain


def test_what_does_not_print_is_written_as_an_escape_once() -> None:
    once = printable(HOSTILE)
    assert shows_nothing_hidden(once)
    assert "\n" not in once
    assert r"\x1b" in once
    assert printable(once) == once
    assert printable("a\tb\nc", lines=True) == "a\tb\nc"


def test_an_error_from_the_wire_is_printable_where_it_is_shown_or_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(GradboxError) as caught:
        client_of(lambda request: problem(OutOfMemory(HOSTILE))).jobs()
    logging.getLogger("test").warning("failed: %s", caught.value)
    assert shows_nothing_hidden(caplog.messages[-1])
    failed = job_view(JobState.FAILED, error=OutOfMemory(HOSTILE))
    with pytest.raises(OutOfMemory) as caught:
        client_of(lambda request: answer(failed)).job("j1").result()
    assert shows_nothing_hidden(str(caught.value))


def test_tables_complaints_and_bars_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    say_table([("ID", "NAME"), ("j1", HOSTILE)])
    complain(f"first\nsecond {HOSTILE}")
    with ProgressBar(HOSTILE, shown=True) as bar:
        bar.show_download(0, 2**30)
    out, err = capsys.readouterr()
    assert shows_nothing_hidden(out)
    assert len(out.splitlines()) == 2
    assert shows_nothing_hidden(err.replace("\r", ""))
    assert "gradbox: first\n  second" in err
