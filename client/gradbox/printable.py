"""Text of somebody else's making, made fit for a terminal or a log.

Job names, problem details, model names and owners come over the wire. An escape sequence in one
could rewrite a terminal's lines, a direction mark could reorder them, a line break could forge a
line of a log.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, Final

FORMAT_VARIABLE: Final = "GRADBOX_LOG_FORMAT"


def printable(text: object, *, lines: bool = False) -> str:
    r"""Return `str(text)` with every character that does not print written as an escape.

    What comes out is unchanged by a second call, so text may be escaped where it is made and again
    where it is shown.

    Args:
        lines: keep line breaks and tabs, for messages of several lines.
    """
    given = str(text)
    if given.isprintable():
        return given
    kept = "\n\t" if lines else ""
    return "".join(
        character
        if character.isprintable() or character in kept
        else character.encode("unicode_escape").decode("ascii")
        for character in given
    )


class PrintableFormatter(logging.Formatter):
    """Escapes what came over the wire, so that nobody's text forges a line or a terminal's state.

    Tracebacks keep their lines, indented, so that none looks like the beginning of a message.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: logging._SysExcInfoType) -> str:  # noqa: N802
        lines = printable(super().formatException(ei), lines=True).splitlines()
        return "\n".join(f"    {line}" for line in lines)


class JsonFormatter(logging.Formatter):
    """Writes each message as one line of JSON, with the `fields` that it was logged with."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr(process: str = "") -> None:
    """Send the log of the whole process to standard error, one line a message.

    Lines are JSON where GRADBOX_LOG_FORMAT=json is in the environment.

    Args:
        process: what stands before the logger's name, as `logging` formats it.
    """
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get(FORMAT_VARIABLE, "") == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(
            PrintableFormatter(f"%(asctime)s %(levelname)s {process}%(name)s: %(message)s")
        )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
