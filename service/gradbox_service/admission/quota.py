"""What one owner's blobs, results and states may take together, with uploads that are under way.

Where the quota is reached, room is made at once of what the owner no longer needs. Where that is
not enough, the request is refused, with when to come again.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

from gradbox.errors import BlobTooLarge, StorageFull
from gradbox.protocol import JobSpec
from gradbox_service.backing import Backing
from gradbox_service.cleaning.cleaner import Cleaner
from gradbox_service.store.room import in_units

# Where jobs that end, or uploads, may make room, and how long a look in vain is good for.
SOON_S: Final = 2
IN_VAIN_S: Final = 1.0
# Whoever is to wait longer asks again: files may go earlier than was thought.
LONGEST_S: Final = 3600


class QuotaReached(StorageFull):
    """An owner's quota is full.

    Attributes:
        retry_after_s: whole seconds until there may be room.
    """

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Quota:
    """The quotas of all owners. Any thread may call it."""

    def __init__(self, quota_bytes: int | None, *, box: Backing, cleaner: Cleaner) -> None:
        """Reserve nothing yet.

        Args:
            quota_bytes: what each owner may have; None is no limit.
        """
        self._quota_bytes = quota_bytes
        self._box = box
        self._cleaner = cleaner
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}  # by owner: what is free is counted once
        self._coming = Counter[str]()  # bytes by owner
        self._in_vain: dict[str, tuple[float, float]] = {}  # owner → when, and what came of it

    @property
    def limits(self) -> bool:
        """Whether there is a quota."""
        return self._quota_bytes is not None

    def check(self, spec: JobSpec, *, owner: str) -> None:
        """Check that there is room for another job, without what it names.

        Raises:
            QuotaReached: there is none.
        """
        if self._quota_bytes is not None:
            with self._lock_of(owner):
                self._check(owner, 0, quota_bytes=self._quota_bytes, keep=spec)

    def taking(self, owner: str) -> Taken:
        """Return what reserves room for an upload; use it as a context manager."""
        return Taken(self, owner)

    def reserve(self, owner: str, num_bytes: int) -> None:
        """Count bytes of an upload for their owner before they come.

        Raises:
            QuotaReached: there is no room for them.
            BlobTooLarge: there would be none if the owner had nothing else.
        """
        if self._quota_bytes is None:
            return
        with self._lock_of(owner):
            self._check(owner, num_bytes, quota_bytes=self._quota_bytes)
            self._count(owner, num_bytes)

    def settle(self, owner: str, num_bytes: int, sizes_bytes: Mapping[str, int]) -> None:
        """Count blobs that are in their place in the stead of the bytes that were reserved."""
        with self._lock_of(owner):
            self._box.owners.claim(owner, sizes_bytes)
            self.free(owner, num_bytes)

    def free(self, owner: str, num_bytes: int) -> None:
        """Count no longer what was reserved."""
        if self._quota_bytes is not None:
            self._count(owner, -num_bytes)

    def _lock_of(self, owner: str) -> threading.Lock:
        return self._locks.setdefault(owner, threading.Lock())

    def _count(self, owner: str, num_bytes: int) -> None:
        with self._lock:
            self._coming[owner] += num_bytes

    def _check(
        self, owner: str, more_bytes: int, *, quota_bytes: int, keep: JobSpec | None = None
    ) -> None:
        if more_bytes > quota_bytes:
            raise BlobTooLarge(
                f"expected at most the {in_units(quota_bytes)} that one owner may have on this "
                f"box, got {in_units(more_bytes)}; send fewer or smaller inputs, or have the box's "
                f"owner raise --owner-quota-bytes"
            )
        taken = {kind: by_owner[owner] for kind, by_owner in self._box.taken().items()}
        taken["blob"] += self._coming[owner]
        missing_bytes = sum(taken.values()) + max(1, more_bytes) - quota_bytes
        if missing_bytes <= 0:
            return
        wait_s = self._make_room(owner, missing_bytes, keep=keep)
        if not wait_s:
            return
        if self._coming[owner] or self._box.records.num_active(owner):
            wait_s = SOON_S
        wanted = f"{in_units(more_bytes)} more do not fit" if more_bytes else "there is no room"
        raise QuotaReached(
            f"{wanted}: of the {in_units(quota_bytes)} that one owner may have on this box, your "
            f"blobs take {in_units(taken['blob'])}, your results {in_units(taken['result'])}, your "
            f"runs {in_units(taken['run'])} and your stores {in_units(taken['store'])}, and jobs "
            f"need them, or they are kept for you to use; wait, or delete what you don't need "
            f"(`job.delete()`, `gradbox blobs delete`, `gradbox runs delete`, `gradbox stores "
            f"delete`): results that nobody has read make room an hour after they were written, "
            f"and all else that no job needs but runs and stores within a quarter of one",
            retry_after_s=min(LONGEST_S, max(SOON_S, math.ceil(min(wait_s, LONGEST_S)))),
        )

    def _make_room(self, owner: str, num_bytes: int, *, keep: JobSpec | None) -> float:
        """Make room as `Cleaner.make_room`, but not again right after it was tried in vain."""
        looked_s, wait_s = self._in_vain.get(owner, (-math.inf, 0.0))
        if time.monotonic() - looked_s < IN_VAIN_S:
            return wait_s
        wait_s = self._cleaner.make_room(owner, num_bytes, keep=keep)
        if wait_s:
            self._in_vain[owner] = (time.monotonic(), wait_s)
        return wait_s


class Taken:
    """Room for one upload, which is reserved until it is claimed or the context is left."""

    def __init__(self, quota: Quota, owner: str) -> None:
        self._quota = quota
        self._owner = owner
        self._num_bytes = 0

    def cover(self, num_bytes: int) -> None:
        """Reserve so many bytes in all, where they are more than so far.

        Raises:
            QuotaReached, BlobTooLarge: as for `Quota.reserve`.
        """
        more_bytes = num_bytes - self._num_bytes
        if more_bytes > 0 or not self._num_bytes:
            self._quota.reserve(self._owner, more_bytes)
            self._num_bytes = num_bytes

    def claim(self, sizes_bytes: Mapping[str, int]) -> None:
        """Note that the owner has sent these blobs, by their digests; they are in their place."""
        self._quota.settle(self._owner, self._num_bytes, sizes_bytes)
        self._num_bytes = 0

    def __enter__(self) -> Taken:
        return self

    def __exit__(self, *_: object) -> None:
        self._quota.free(self._owner, self._num_bytes)
