"""The text of a file that a person wrote: models.toml, a job file, client.toml."""

from __future__ import annotations

from pathlib import Path


def read_written(path: Path) -> str:
    """Return the text, without the byte-order mark with which some editors begin it.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8; the message names the line.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"in line {line} the byte {error.object[error.start]:#04x}, which is not UTF-8; save "
            f"the file as UTF-8"
        ) from None
