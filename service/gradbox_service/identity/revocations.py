"""Revocations that Redis does not take for now, kept in a file that the service reads first.

Redis refuses every change while its disk or its memory is full, which may be the very work of the
user whose token is to be revoked. So what it refuses is noted in a file of fixed length, whose room
on the disk was taken when the box first started: a note changes bytes in place and needs no more.
(A file system that copies on write, such as btrfs or ZFS, may want a block for it all the same.)

The file is of lines of 64 characters and a line break, each the SHA-256 of a token or empty. When
Redis takes changes again, `Tokens.reconcile` removes the tokens there and the notes here.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gradbox.errors import GradboxError

NAME: Final = "revoked-tokens"
NUM_LINES: Final = 1000
LINE_BYTES: Final = 65
EMPTY: Final = b" " * (LINE_BYTES - 1) + b"\n"
DIGEST: Final = re.compile(rb"[0-9a-f]{64}")
# More than a tick of any file system's clock.
TICK_S: Final = 2.0


class NotRevoked(GradboxError):
    """A revocation could neither be made in Redis nor noted on the disk."""

    code = "not-revoked"
    title = "The token is still valid"


class Revocations:
    """The file of one box, shared by its service and by `gradbox tokens`."""

    def __init__(self, data: Path) -> None:
        """Open nothing yet.

        Args:
            data: the box's data folder.
        """
        self.path = data / NAME
        self._seen: tuple[int, int] | None = None
        self._digests: frozenset[str] = frozenset()

    def prepare(self) -> None:
        """Make the file if there is none, and so take its room.

        Raises:
            OSError: the disk has none.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked(os.O_RDWR | os.O_CREAT) as descriptor:
            missing_bytes = NUM_LINES * LINE_BYTES - os.fstat(descriptor).st_size
            if missing_bytes > 0:
                os.pwrite(descriptor, EMPTY * NUM_LINES, 0)
                os.fsync(descriptor)

    def digests(self) -> frozenset[str]:
        """Return the hashes that are noted; read again only when the file may have changed."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return frozenset()
        version = (found.st_mtime_ns, found.st_ino)
        if version != self._seen:
            self._digests = frozenset(
                line.decode() for line in self.path.read_bytes().split() if DIGEST.fullmatch(line)
            )
            # Two changes within a tick of the file system's clock have one time.
            is_settled = time.time() - found.st_mtime > TICK_S
            self._seen = version if is_settled else None
        return self._digests

    def add(self, digests: Iterable[str]) -> None:
        """Note hashes, on the disk when this returns.

        Raises:
            NotRevoked: there is no such file, or more notes than it holds.
        """
        try:
            with self._locked(os.O_RDWR) as descriptor:
                lines = _lines(descriptor)
                wanted = {digest.encode() for digest in digests} - set(lines)
                free = [index for index, line in enumerate(lines) if not DIGEST.fullmatch(line)]
                if len(wanted) > len(free):
                    raise NotRevoked(
                        f"{self.path} holds {NUM_LINES} revocations that Redis has not taken yet: "
                        f"make room for Redis first, on its disk or by --redis-memory-bytes"
                    )
                for index, digest in zip(free, wanted, strict=False):
                    os.pwrite(descriptor, digest, index * LINE_BYTES)
                os.fsync(descriptor)
        except OSError as error:
            raise NotRevoked(
                f"Redis takes no change for now, and the revocation cannot be noted in {self.path} "
                f"({error.strerror}): run this on the box's machine, with --data and the box's "
                f"data folder, or stop the service until Redis has room again"
            ) from error

    def remove(self, digests: Iterable[str]) -> None:
        """Remove notes of hashes."""
        unwanted = {digest.encode() for digest in digests}
        with self._locked(os.O_RDWR) as descriptor:
            for index, line in enumerate(_lines(descriptor)):
                if line in unwanted:
                    os.pwrite(descriptor, EMPTY, index * LINE_BYTES)

    @contextmanager
    def _locked(self, flags: int) -> Iterator[int]:
        descriptor = os.open(self.path, flags | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)


def _lines(descriptor: int) -> list[bytes]:
    content = os.pread(descriptor, NUM_LINES * LINE_BYTES, 0)
    starts = range(0, len(content), LINE_BYTES)
    return [content[start : start + LINE_BYTES - 1] for start in starts]
