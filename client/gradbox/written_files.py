"""The text of a file that a person wrote: models.toml, a job file, client.toml.

Some editors begin UTF-8 with a byte-order mark, which is no part of the text. Others save in the
encoding of their system, in which there is no TOML.
"""

from __future__ import annotations

from pathlib import Path


def read_written(path: Path) -> str:
    """Return the text, without a byte-order mark.

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
