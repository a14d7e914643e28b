"""The text of a file that a person wrote, and files that are written whole or not at all.

Some editors begin UTF-8 with a byte-order mark, which is no part of the text. Others save in the
encoding of their system, in which there is no TOML.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Give a file beside `path`, of mode 0600, and put it in its place when it is written."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    try:
        yield Path(name)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
