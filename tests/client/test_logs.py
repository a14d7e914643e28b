"""Nothing that came over the wire forges a line of the log or moves a terminal's cursor."""

from __future__ import annotations

import io
import logging

from gradbox.printable import PrintableFormatter


def logged(write: object, *arguments: object, error: BaseException | None = None) -> str:
    """Return what a message becomes in the log."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter("%(levelname)s %(message)s"))
    log = logging.Logger("test")
    log.addHandler(handler)
    log.error(write, *arguments, exc_info=error)
    return stream.getvalue()


def test_a_message_is_one_line_of_what_prints() -> None:
    text = logged("job %s failed", "a\n2026-01-01 ERROR forged\x1b[2J\x07\u202e")
    assert text.count("\n") == 1
    assert r"a\n2026-01-01 ERROR forged\x1b[2J\x07\u202e failed" in text


def test_what_prints_is_left_alone() -> None:
    assert "job Übung-η² failed" in logged("job %s failed", "Übung-η²")


def test_a_traceback_keeps_its_lines_and_none_reads_as_a_message() -> None:
    try:
        raise ValueError("first\n2026-01-01 00:00:00 ERROR forged\x1b[2J")
    except ValueError as error:
        lines = logged("it failed", error=error).splitlines()
    assert len(lines) > 3
    assert all(line.startswith("    ") for line in lines[1:])
    assert "\x1b" not in "".join(lines)
    assert any("raise ValueError" in line for line in lines)
