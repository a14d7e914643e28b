"""The order of names with numbers in them."""

from __future__ import annotations

import re


def natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts shard2 before shard10, as a key."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
