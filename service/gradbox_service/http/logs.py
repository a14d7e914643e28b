"""The service's log: one line a message, and nothing in it that does not print."""

from __future__ import annotations

import logging
import sys

from gradbox.printable import printable

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


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


def log_to_stderr() -> None:
    """Send the log of the whole process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
