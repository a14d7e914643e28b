"""Results: small ones in Redis, the others in DATA/results/JOB.ATTEMPT.safetensors.

The attempt is part of the name, so an attempt that was thought dead and ends late never replaces
the file that the record speaks of. Unfinished jobs' checkpoints are in a folder beside.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final

import redis
from redis.client import Pipeline

from gradbox_service.store.estimates import Estimates
from gradbox_service.store.files import (
    FileUse,
    files_of,
    make_folder,
    touch,
    use_of,
    write_whole,
)
from gradbox_service.store.room import Room
from gradbox_service.store.small import SmallFiles

FETCHED_MODE: Final = 0o400


class ResultStore:
    """The results under one folder and in one Redis, shared by every process of the box."""

    def __init__(
        self,
        data: Path,
        *,
        connection: redis.Redis | None = None,
        reserve_bytes: int | None = None,
    ) -> None:
        """Open the results of the box whose data is in this folder, see `BlobStore`."""
        self.data, self._root = data, data / "results"
        self.room = Room(self._root, reserve_bytes)
        self._small = SmallFiles(connection, "result")

    def write(self, pipe: Pipeline, job_id: str, *, attempt: int, content: bytes) -> None:
        """Write a small result by the transaction that ends its job."""
        self._small.write(pipe, _name(job_id, attempt), content)

    def small_of(
        self, jobs: Sequence[tuple[str, int]], *, fetched: Collection[tuple[str, int]]
    ) -> dict[str, bytes]:
        """Return those results of some jobs and their attempts that are in Redis, by job.

        Args:
            fetched: those that are for their jobs' owners.
        """
        names = {_name(*job): job[0] for job in jobs}
        sent = [_name(*job) for job in fetched]
        found = self._small.fetch_many(sent)
        found |= self._small.read_many([n for n in names if n not in found], used=False)
        return {names[name]: content for name, content in found.items()}

    def open(self, job_id: str, *, attempt: int) -> BinaryIO:
        """Open a result, which is used now.

        Raises:
            FileNotFoundError: it is not here.
        """
        if (content := self._small.use(_name(job_id, attempt))) is not None:
            return BytesIO(content)
        path = self.path(job_id, attempt=attempt)
        touch(path)
        return path.open("rb")

    def on_disk(self, job_id: str, *, attempt: int) -> Path:
        """Return where the result is as a file, which a small one is from now on, too."""
        path = self.path(job_id, attempt=attempt)
        content = None if path.exists() else self._small.read(_name(job_id, attempt))
        if content is not None:
            make_folder(path.parent)
            write_whole(path, content)
        return path

    def use_of(self, job_id: str, *, attempt: int) -> FileUse | None:
        """Return the result's size and last use; None if it is not here."""
        name = _name(job_id, attempt)
        found = self._small.uses([name]).get(name)
        return found or use_of(self.path(job_id, attempt=attempt))

    def path(self, job_id: str, *, attempt: int) -> Path:
        """Return where the attempt's result is once it is committed."""
        return self._root / f"{job_id}.{attempt}.safetensors"

    def partial_path(self, job_id: str, *, attempt: int) -> Path:
        """Return where the attempt writes its result before it renames it to `path`."""
        return self.path(job_id, attempt=attempt).with_suffix(".partial")

    @property
    def checkpoints(self) -> Path:
        """The folder of the states from which jobs that were interrupted go on."""
        return self.data / "checkpoints"

    @property
    def estimates(self) -> Estimates:
        """What was measured of jobs, in a folder beside."""
        return Estimates(self._root.with_name("estimates"))

    def remove_checkpoint(self, job_id: str) -> None:
        """Remove a job's state, whichever attempt wrote it: the job has ended."""
        for path in files_of(self.checkpoints, job_id):
            path.unlink(missing_ok=True)

    def files(self) -> Iterator[tuple[str, FileUse]]:
        """Give the job's id, the size and the last use of every committed result."""
        in_redis = dict(self._small.all())
        yield from ((name.rpartition(".")[0], found) for name, found in in_redis.items())
        for path in self._root.glob("*.safetensors"):
            found = use_of(path) if path.stem not in in_redis else None
            if found is not None:
                yield path.stem.rpartition(".")[0], found

    def touch(self, job_id: str, *, attempt: int) -> bool:
        """Note that the result is used now; False if it is not here."""
        path = self.path(job_id, attempt=attempt)
        return self._small.use(_name(job_id, attempt)) is not None or touch(path) is not None

    def write_out(self) -> None:
        """Move small results that are kept for long into files.

        Raises:
            StorageFull: the disk does not hold them.
        """

        def write(name: str, content: bytes, found: FileUse) -> None:
            job_id, _, attempt = name.rpartition(".")
            path = self.path(job_id, attempt=int(attempt))
            self.room.check(len(content), what="a result")
            with self.room.noticing_a_full_disk(what="a result"):
                make_folder(path.parent)
                write_whole(path, content, flushed=True)
            os.utime(path, (found.used_s, found.written_s))
            if found.read_only:
                path.chmod(FETCHED_MODE)

        self._small.write_out(write)

    def note_fetched(self, job_id: str, *, attempt: int) -> None:
        """Note that the job's owner has all of the result: its file is made read-only."""
        if self._small.use(_name(job_id, attempt)) is not None:
            self._small.note_fetched(_name(job_id, attempt))
        with suppress(OSError):  # gone, or on a disk that notes nothing
            self.path(job_id, attempt=attempt).chmod(FETCHED_MODE)

    def remove(self, job_id: str, *, attempt: int | None, unused_since_s: float) -> bool:
        """Remove what attempts at a job committed, but what was used after a time.

        Args:
            attempt: the one that the job's record speaks of, if there is a record.

        Returns:
            Whether anything went.
        """
        gone: list[object] = []
        if attempt is not None and self._small.remove(
            _name(job_id, attempt), unused_since_s=unused_since_s
        ):
            gone.append(attempt)
            unused_since_s = math.inf  # a file of the same is a copy, see `on_disk`
        for path in files_of(self._root, job_id):
            found = use_of(path) if path.suffix == ".safetensors" else None
            if found is not None and found.used_s <= unused_since_s:
                path.unlink(missing_ok=True)
                gone.append(path)
        return bool(gone)

    def sweep(self, *, is_written: Callable[[str, int], bool], unused_since_s: float) -> None:
        """Remove what attempts left half written.

        Args:
            is_written: tells whether an attempt at a job still runs.
            unused_since_s: what was written to after this time stays.
        """
        for path in self._root.glob("*.partial"):
            found = use_of(path)
            job_id, _, attempt = path.stem.rpartition(".")
            if found is None or found.used_s > unused_since_s or not attempt.isdigit():
                continue
            if not is_written(job_id, int(attempt)):
                path.unlink(missing_ok=True)

    def discard(self, job_id: str, *, attempt: int) -> None:
        """Remove what the attempt wrote, whether committed or not."""
        self._small.remove(_name(job_id, attempt), unused_since_s=math.inf)
        self.partial_path(job_id, attempt=attempt).unlink(missing_ok=True)
        self.path(job_id, attempt=attempt).unlink(missing_ok=True)


def _name(job_id: str, attempt: int) -> str:
    return f"{job_id}.{attempt}"
