"""Mends the file that Redis appends its changes to, after a power cut.

A file system may have made a file longer before the power went, and never have written the bytes:
the file then ends in zeros. Redis ignores a last command that is cut off, but refuses to start
behind a byte that begins none. No change ends in a zero byte (each ends in a line break), so zeros
at the end are nothing that was ever written.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

FOLDER: Final = "appendonlydir"
BACKUPS: Final = "before-cut"
STEP_BYTES: Final = 2**20


def cut_zeros(folder: Path) -> list[Path]:
    """Cut zero bytes off the ends of the append-only files of a server that does not run.

    Args:
        folder: the server's data folder.

    Returns:
        The backups that were made, one for each file that was cut.

    Raises:
        OSError: there is no room for a backup; nothing was changed then.
    """
    backups = []
    for path in sorted((folder / FOLDER).glob("*.incr.aof")):
        size_bytes, kept_bytes = path.stat().st_size, _length_without_zeros(path)
        if kept_bytes == size_bytes:
            continue
        backup = folder / BACKUPS / f"{path.name}.{time.strftime('%Y%m%dT%H%M%S')}"
        backup.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copy2(path, backup)
        os.truncate(path, kept_bytes)
        log.warning(
            "%s ended in %d zero bytes, as after a power cut: they are cut off, and the file as "
            "it was is kept as %s",
            path,
            size_bytes - kept_bytes,
            backup,
        )
        backups.append(backup)
    return backups


def _length_without_zeros(path: Path) -> int:
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - STEP_BYTES)
            file.seek(start)
            kept = file.read(end - start).rstrip(b"\0")
            if kept:
                return start + len(kept)
            end = start
    return 0
