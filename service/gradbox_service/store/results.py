"""Result files on disk: DATA/results/JOB.ATTEMPT.safetensors; unfinished jobs' checkpoints beside.

The attempt is part of the name, so an attempt that was thought dead and ends late never replaces
the file that the record speaks of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Final

from gradbox.tensors.checksums import is_whole
from gradbox_service.store.files import FileUse, files_of, touch, use_of
from gradbox_service.store.room import Room

# What was written so long before a power cut may not have reached the disk.
UNFLUSHED_S: Final = 300.0
FETCHED_MODE: Final = 0o400


class ResultStore:
    """The results under one folder, shared by every process of the box."""

    def __init__(self, root: Path, *, reserve_bytes: int | None = None) -> None:
        self._root = root
        self.room = Room(root, reserve_bytes)
        self._opened_s = time.time()
        self._whole: dict[Path, bool] = {}  # of those that were looked at, see `is_spoilt`

    def path(self, job_id: str, *, attempt: int) -> Path:
        """Return where the attempt's result is once it is committed."""
        return self._root / f"{job_id}.{attempt}.safetensors"

    def partial_path(self, job_id: str, *, attempt: int) -> Path:
        """Return where the attempt writes its result before it renames it to `path`."""
        return self.path(job_id, attempt=attempt).with_suffix(".partial")

    @property
    def checkpoints(self) -> Path:
        """The folder of the states from which jobs that were interrupted go on."""
        return self._root.with_name("checkpoints")

    def remove_checkpoint(self, job_id: str) -> None:
        """Remove a job's state, whichever attempt wrote it: the job has ended."""
        for path in files_of(self.checkpoints, job_id):
            path.unlink(missing_ok=True)

    def files(self) -> Iterator[tuple[str, FileUse]]:
        """Give the job's id, the size and the last use of every committed result."""
        for path in self._root.glob("*.safetensors"):
            found = use_of(path)
            if found is not None:
                yield path.stem.rpartition(".")[0], found

    def touch(self, job_id: str, *, attempt: int) -> bool:
        """Note that the result is used now; False if it is not here."""
        return touch(self.path(job_id, attempt=attempt)) is not None

    def is_spoilt(self, job_id: str, *, attempt: int) -> bool:
        """Return whether a power cut has left other bytes of a result than were written.

        Only one that was written in the last minutes before this process began is looked at, once.
        """
        path = self.path(job_id, attempt=attempt)
        found = use_of(path)
        if found is None or not self._unflushed_since_s <= found.written_s < self._opened_s:
            return False
        if path not in self._whole:
            self._whole[path] = is_whole(path)
        return not self._whole[path]

    @cached_property
    def _unflushed_since_s(self) -> float:
        written_s = (found.written_s for _, found in self.files())
        return max((s for s in written_s if s < self._opened_s), default=0.0) - UNFLUSHED_S

    def note_fetched(self, job_id: str, *, attempt: int) -> None:
        """Note that the job's owner has all of the result: its file is made read-only."""
        with suppress(OSError):  # gone, or on a disk that notes nothing
            self.path(job_id, attempt=attempt).chmod(FETCHED_MODE)

    def remove(self, job_id: str, *, unused_since_s: float) -> bool:
        """Remove what attempts at a job committed, but what was used after a time.

        Returns:
            Whether anything went.
        """
        gone = []
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
        self.partial_path(job_id, attempt=attempt).unlink(missing_ok=True)
        self.path(job_id, attempt=attempt).unlink(missing_ok=True)


def result_store(data: Path, *, reserve_bytes: int | None = None) -> ResultStore:
    """Return the results of the box whose data is in this folder; see `Room` for the reserve."""
    return ResultStore(data / "results", reserve_bytes=reserve_bytes)
