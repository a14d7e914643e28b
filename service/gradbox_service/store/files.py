"""How files get their names, so that a name always means a whole file."""

from __future__ import annotations

import os
from pathlib import Path


def make_folder(path: Path) -> None:
    """Make a folder that only the box's own user reads, and its parents."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def put_in_place(beside: Path, place: Path) -> None:
    """Rename a flushed file to its name, and flush the name.

    Whoever has the earlier file of that name open or mapped keeps it.
    """
    make_folder(place.parent)
    os.replace(beside, place)
    flush_folder(place.parent)


def flush_folder(path: Path) -> None:
    """Make the names in a folder survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
