"""Which stored files go: by age, then by an owner's quota, by the room on the disk, by number.

A file's modification time is its last use: its bytes never change, and whoever uses it sets the
time. Nothing here touches a disk.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

# What was used within the last hour goes only by age: its job may be about to be posted, or its
# result about to be read.
SPARED_S: Final = 3600.0


@dataclass(frozen=True)
class Stored:
    """One file.

    Attributes:
        name: a result's job id, or a blob's digest.
        owner: against whom it counts; "" where that does not matter or nobody is known.
        used_s: when it was last used, in seconds since 1970.
    """

    kind: Literal["result", "blob"]
    name: str
    owner: str
    size_bytes: int
    used_s: float


@dataclass(frozen=True)
class Limits:
    """What may stay.

    Attributes:
        quota_bytes: what one owner's files may take together; None is no limit.
        total_bytes: what all files may take together.
        num_blobs: how many blobs may stay, however small.
    """

    result_age_s: float
    blob_age_s: float
    quota_bytes: int | None
    total_bytes: float
    num_blobs: float = math.inf


def expired(
    files: Iterable[Stored], limits: Limits, *, needed: Collection[str], now_s: float
) -> list[Stored]:
    """Return the files that are to go, least recently used first.

    Args:
        needed: names of files that jobs still read; they count, and stay.
    """
    oldest_first = sorted(files, key=lambda file: file.used_s)
    ages = {"result": limits.result_age_s, "blob": limits.blob_age_s}
    free = [file for file in oldest_first if file.name not in needed]
    gone = {file for file in free if now_s - file.used_s > ages[file.kind]}
    idle = [file for file in free if now_s - file.used_s > SPARED_S]
    if limits.quota_bytes is not None:
        for owner in sorted({file.owner for file in oldest_first if file.owner}):
            own = [file for file in oldest_first if file.owner == owner]
            gone |= _until_within(own, limits.quota_bytes, idle=idle, gone=gone)
    gone |= _until_within(oldest_first, limits.total_bytes, idle=idle, gone=gone)
    idle_blobs = [file for file in idle if file.kind == "blob" and file not in gone]
    num_blobs = sum(file.kind == "blob" and file not in gone for file in oldest_first)
    gone |= set(idle_blobs[: int(max(0.0, num_blobs - limits.num_blobs))])
    return [file for file in oldest_first if file in gone]


def _until_within(
    files: Sequence[Stored], bound_bytes: float, *, idle: Sequence[Stored], gone: set[Stored]
) -> set[Stored]:
    """Return the first idle ones of `files` without which the rest is within the bound."""
    taken_bytes = sum(file.size_bytes for file in files if file not in gone)
    chosen: set[Stored] = set()
    candidates = set(files) - gone
    for file in idle:
        if taken_bytes <= bound_bytes:
            break
        if file in candidates:
            chosen.add(file)
            taken_bytes -= file.size_bytes
    return chosen
