"""Looks once a minute for what has expired, and removes it: records, results, blobs, notes, runs.

Between two looks it makes room for an owner whose quota is reached, when they ask for it.

A record says that its result is gone before the file goes, and a blob loses its owners before its
file goes, so whoever asks in between hears that it is not there.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from typing import TypeVar

from gradbox.errors import BlobInUse, StorageFull
from gradbox.protocol import JobSpec, names_in
from gradbox_service.backing import Backing
from gradbox_service.cleaning.expiry import (
    SETTLED_SPARED_S,
    SPARED_S,
    Limits,
    Stored,
    crowding,
    expired,
)
from gradbox_service.cleaning.needed import Needed, Spent, spent
from gradbox_service.cleaning.removed import note_removed
from gradbox_service.cleaning.under_way import UnderWay
from gradbox_service.database.conditional_commands import Outdated
from gradbox_service.database.leadership import LEADER_TTL_S
from gradbox_service.database.refusals import unless_refused
from gradbox_service.jobs import JobRecord
from gradbox_service.repeating_thread import RepeatingThread
from gradbox_service.runs.removal import expire
from gradbox_service.settings import Settings
from gradbox_service.store.files import FileUse, use_of

T = TypeVar("T")

log = logging.getLogger(__name__)

# Of the memory that Redis may take, what it notes of blobs may fill, and what it notes of one.
BLOBS_FRACTION = 0.3
BLOB_NOTE_BYTES = 512
# Records that end by age in one look; the rest waits for the next one.
MAX_RECORDS = 1000
# Files whose owners are looked up at once.
PAGE = 1000
# Of what may go at once, so much goes at once: not every step of a loop is to look.
AT_ONCE_FRACTION = 0.25


class Cleaner(RepeatingThread):
    """Removes what the settings let expire, at once and then every `clean_every_s`."""

    def __init__(self, settings: Settings, box: Backing) -> None:
        super().__init__("cleaner", failed_pause_s=settings.clean_every_s)
        self._settings = settings
        self._box = box
        self._records, self._owners = box.records, box.owners
        self._blobs, self._results = box.blobs, box.results
        self._needed = Needed(box.records, box.runs)
        self._unexplained_bytes = 0  # by which more was counted after the last look
        self.under_way = UnderWay()

    def clean(self) -> list[Stored]:
        """Remove what has expired; return the files that went."""
        now_s = time.time()
        self._end_records(now_s=now_s)
        self._end_runs(now_s=now_s)
        self._end_stores(now_s=now_s)
        with suppress(StorageFull):  # then they stay in Redis
            self._blobs.write_out()
            self._results.write_out()
        self._blobs.sweep()
        self._results.sweep(is_written=self._is_written, unused_since_s=now_s - SPARED_S)
        self._sweep_checkpoints(unused_since_s=now_s - SPARED_S)
        counted_bytes = self._counted_bytes()
        files = list(self.stored(owned=False))
        there_bytes = sum(file.size_bytes for file in files)
        if counted_bytes - there_bytes > self._unexplained_bytes:
            if num_gone := note_removed(self._box):
                log.warning("%d results and blobs are gone that the box did not remove", num_gone)
            self._unexplained_bytes = max(0, self._counted_bytes() - there_bytes)
        self._keep_quotas()
        limits = self._limits(there_bytes)
        if there_bytes > limits.total_bytes:
            self._free_the_disk(there_bytes - limits.total_bytes)
            files = list(self.stored())
        choose = partial(expired, files, limits, now_s=now_s)
        if not choose(needed=frozenset()):
            return []  # specs are read only where something could go
        return self.remove(choose(needed=self._needed.names()))

    def make_room(self, owner: str, num_bytes: int, *, keep: JobSpec | None = None) -> float:
        """Remove files of an owner until so many bytes less count against them.

        What only jobs that have ended needed goes first, and then what was not used lately.

        Args:
            keep: a job that is about to be posted; what it names stays.

        Returns:
            The seconds until it can be done; 0 where it is.
        """
        with self.under_way.removing(owner):
            named = frozenset(names_in(keep))
            missing_bytes = num_bytes - self._free_spent(owner, num_bytes, keep=named)
            if missing_bytes <= 0:
                return 0.0
            needed, now_s = self.needed() | named, time.time()
            own = [f for f in self.stored() if owner in f.owners and f.name not in needed]
            for file in sorted(own, key=lambda file: file.due_s):
                if file.due_s > now_s or self._remove(file, owner=owner):
                    missing_bytes -= file.size_bytes
                if missing_bytes <= 0:
                    return max(0.0, file.due_s - now_s)
            return math.inf

    def delete_blob(self, owner: str, digest: str) -> None:
        """Remove a blob of an owner; it stays where it is another's too. Nothing happens twice.

        Raises:
            BlobInUse: a job of the owner that waits or runs needs it, or a step of a run.
        """
        with self.under_way.removing(owner):
            file = self._blobs.use_of(digest)
            if file is None or not self._owners.owns(owner, digest):
                return
            active = self._records.active()
            kept = self._records.many(self._box.runs.jobs_of_kept())
            own = [record.id for record in (*active, *kept) if record.owner == owner]
            for job_id, names in self._needed.by_job(own).items():
                if digest in names:
                    raise BlobInUse(
                        f"job {job_id} needs blob {digest[:12]}…: wait for its end, or cancel it; "
                        f"a run's step that is made needs it until later states are on disk"
                    )
            blob = Stored("blob", digest, (owner,), file.size_bytes, file.used_s)
            self._remove(blob, owner=owner)

    def stored(self, *, owned: bool = True) -> Iterator[Stored]:
        """Give every result and blob.

        Args:
            owned: whether to look up whose each is.
        """
        for some in _pages(self._results.files()):
            records = self._records.many([name for name, _ in some]) if owned else ()
            of = {record.id: record for record in records}
            for name, file in some:
                record = of.get(name)
                whose: tuple[str, ...] = (record.owner,) if record else ()
                settled = record is not None and _was_read(file, record)
                yield Stored("result", name, whose, file.size_bytes, file.used_s, settled)
        owners = self._owners.owners() if owned else {}
        for name, file in self._blobs.files():
            whose = tuple(owners.get(name, ()))
            yield Stored("blob", name, whose, file.size_bytes, file.used_s, owned)

    def needed(self) -> frozenset[str]:
        """Return the names of files that jobs still read."""
        return self._needed.names()

    def remove(self, files: Iterable[Stored]) -> list[Stored]:
        """Remove files, but those that were used since they were looked at; return what went."""
        gone = [file for file in files if self._remove(file)]
        if gone:
            taken = sum(file.size_bytes for file in gone)
            log.info("removed %d results and blobs of %d bytes together", len(gone), taken)
        return gone

    def _step(self) -> None:
        pause_s = min(LEADER_TTL_S, self._settings.clean_every_s)
        with unless_refused("nothing is cleaned up"):
            if self._box.leadership.hold(ttl_s=LEADER_TTL_S):
                pause_s = self._settings.clean_every_s
                self.clean()
        self._stopping.wait(pause_s)

    def _free_spent(
        self,
        owner: str,
        num_bytes: float,
        *,
        keep: frozenset[str] = frozenset(),
    ) -> int:
        """Remove what only ended jobs of an owner needed, least recently used first.

        Args:
            num_bytes: how much is to go at least, if there is as much.
            keep: names of files that stay.

        Returns:
            The bytes that went.
        """
        found = spent(owner, self._records, self._needed, now_s=time.time())
        needed = self.needed() | keep
        files = [file for file in self._spent_files(owner, found) if file.name not in needed]
        wanted_bytes = max(num_bytes, AT_ONCE_FRACTION * sum(file.size_bytes for file in files))
        freed_bytes = 0
        for file in sorted(files, key=lambda file: file.used_s):
            if freed_bytes >= wanted_bytes:
                break
            freed_bytes += file.size_bytes if self._remove(file, owner=owner) else 0
        return freed_bytes

    def _spent_files(self, owner: str, found: Spent) -> Iterator[Stored]:
        uses = self._blobs.uses(self._owners.owned_among(owner, found.blobs))
        for name, ended_s in found.blobs.items():
            file = uses.get(name)
            if file is not None and file.used_s <= ended_s:
                yield Stored("blob", name, (owner,), file.size_bytes, file.used_s)
        for record in found.results:
            file = self._results.use_of(record.id, attempt=record.attempt)
            if file is not None and file.read_only:
                yield Stored("result", record.id, (owner,), file.size_bytes, file.used_s)

    def _keep_quotas(self) -> None:
        """Remove what owners have above the quota: results count, which are not refused."""
        quota_bytes = self._settings.owner_quota_bytes
        if quota_bytes is None:
            return
        for owner, taken_bytes in sum(self._box.taken().values(), Counter[str]()).items():
            if taken_bytes > quota_bytes:
                self.make_room(owner, taken_bytes - quota_bytes)

    def _free_the_disk(self, num_bytes: float) -> None:
        """Remove what only ended jobs needed, first that of whoever takes most."""
        for owner, _ in self._taken().most_common():
            with self.under_way.removing(owner):
                num_bytes -= self._free_spent(owner, num_bytes)
            if num_bytes <= 0:
                return

    def _taken(self) -> Counter[str]:
        """Return what everybody's blobs and results take."""
        return self._owners.totals() + self._records.result_bytes()

    def _counted_bytes(self) -> int:
        """Return what all blobs and results take that somebody has."""
        blob_bytes = sum(self._owners.sizes().values())
        return blob_bytes + sum(self._records.result_bytes().values())

    def _limits(self, there_bytes: int) -> Limits:
        there_is_bytes = there_bytes + self._blobs.room.left_bytes()
        memory_bytes = self._records.memory().bound_bytes or math.inf
        return Limits(
            result_age_s=self._settings.result_age_s,
            blob_age_s=self._settings.blob_age_s,
            total_bytes=self._settings.storage_share * there_is_bytes,
            num_blobs=BLOBS_FRACTION * memory_bytes / BLOB_NOTE_BYTES,
        )

    def _end_records(self, *, now_s: float) -> None:
        """Forget jobs whose time is over, or that crowd Redis, but none that another one reads."""
        needed = cache(self._needed.records)  # specs are read only where something could go

        def may_go(record: JobRecord) -> bool:
            return self._is_idle(record, now_s=now_s) and record.id not in needed()

        before_s = now_s - self._settings.record_age_s
        old = self._records.ended(before_s=before_s, limit=MAX_RECORDS)
        crowded = crowding(self._records, may_go=may_go)
        for job_id in [*(job_id for job_id in old if job_id not in needed()), *crowded]:
            record = self._records.get(job_id)
            if record is not None:
                self._results.discard(job_id, attempt=record.attempt)
            self._records.forget(job_id)

    def _end_runs(self, *, now_s: float) -> None:
        box = self._box
        before_s = now_s - self._settings.run_age_s
        expire(before_s=before_s, runs=box.runs, records=box.records, files=box.run_files)
        box.run_files.sweep(box.runs.all(), unused_for_s=SPARED_S)

    def _end_stores(self, *, now_s: float) -> None:
        box = self._box
        for store in box.stores.all():
            if store.used_s < now_s - self._settings.store_age_s and not store.grants:
                with suppress(Outdated):
                    box.stores.forget(store)
                    box.stores.files.remove(store.id)
        box.stores.files.sweep(box.stores.all(), unused_for_s=SPARED_S)

    def _is_idle(self, record: JobRecord, *, now_s: float) -> bool:
        """Return whether a job ended, and its result was used, long enough ago to make room."""
        if record.finished_s is None:
            return False
        found = self._results.use_of(record.id, attempt=record.attempt)
        if found is None:
            return now_s - record.finished_s > SETTLED_SPARED_S
        spared_s = SETTLED_SPARED_S if _was_read(found, record) else SPARED_S
        return now_s - max(record.finished_s, found.used_s) > spared_s

    def _sweep_checkpoints(self, *, unused_since_s: float) -> None:
        """Remove what jobs left that ended while no worker could."""
        for path in self._results.checkpoints.glob("*"):
            found = use_of(path)
            record = self._records.get(path.name.partition(".")[0])
            over = record is None or record.state.final
            if over and found is not None and found.used_s < unused_since_s:
                path.unlink(missing_ok=True)

    def _is_written(self, job_id: str, attempt: int) -> bool:
        record = self._records.get(job_id)
        return record is not None and record.held_by(attempt)

    def _remove(self, file: Stored, *, owner: str | None = None) -> bool:
        """Remove a file; where an owner is given and it is another's too, it stays theirs."""
        if file.kind == "blob":
            if owner is None:
                self._owners.forget(file.name)
            elif not self._owners.release(owner, file.name):
                return True
            return self._blobs.remove(file.name, unused_since_s=file.used_s)
        record = self._records.get(file.name)
        if record is not None and not record.state.final:
            return False  # its attempt has written it, and its end is not noted yet
        if record is not None and not self._is_used(record, since_s=file.used_s):
            self._records.update(record.id, partial(JobRecord.drop_result, now_s=time.time()))
        attempt = None if record is None else record.attempt
        return self._results.remove(file.name, attempt=attempt, unused_since_s=file.used_s)

    def _is_used(self, record: JobRecord, *, since_s: float) -> bool:
        found = self._results.use_of(record.id, attempt=record.attempt)
        return found is not None and found.used_s > since_s


def _was_read(file: FileUse, record: JobRecord) -> bool:
    """Return whether a result was used after the end of its job, which wrote it before."""
    return file.read_only or (record.finished_s is not None and file.used_s > record.finished_s)


def _pages(files: Iterable[T]) -> Iterator[list[T]]:
    files = iter(files)
    while page := list(islice(files, PAGE)):
        yield page
