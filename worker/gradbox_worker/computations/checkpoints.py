"""A long job's state, DATA/checkpoints/JOB.safetensors, from which another attempt goes on.

The file holds the tensors of an engine's checkpoint and, in its metadata, its JSON values, the
job's identity, and how often the job was resumed. It is written beside and renamed, so it is there
whole or not at all, in the folder that all workers of the box share. It has checksums, so one whose
bytes a disk has changed is not gone on from.

A job in ranges has a file for each, JOB.START-STOP.safetensors, which the device writes that has
the range, if it sees the box's data folder. Of ranges of the other shards that rows are multiplied
with it is JOB.others-START-STOP.safetensors. Another attempt whose ranges have the same shards goes
on from them, and so does the device that takes a range over from one that died.

Rows that are written in place are not copied into it. Before it is written they are flushed, and
their file gets a second name, DATA/checkpoints/JOB.ATTEMPT.rows, which the checkpoint states. So
it claims no row that a power cut may have taken, and the attempt that goes on writes behind
them in the same file. All of it is removed when the job has ended.

When one is written: once an attempt has run for a minute, at most every 30 s, and only as long as
all writing so far, and one more like the last, takes at most 3 % of the attempt's time. The first
is taken to be written at the pace of a slow disk. What stands in the way of a checkpoint, such as a
full disk, costs the checkpoint and not the job.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Protocol

from safetensors import SafetensorError, safe_open

from gradbox.errors import InvalidInputs, StorageFull
from gradbox.tensors.checksums import is_whole
from gradbox_engine import Checkpoint, Checkpoints
from gradbox_engine.checkpoint import NoCheckpoints
from gradbox_engine.ranges import Range
from gradbox_engine.ranges.samples import SampleTask
from gradbox_service.store import Room
from gradbox_service.store.files import files_of, put_in_place
from gradbox_worker.computations.strides import laid_out, strides_of
from gradbox_worker.files.result_file import write_result
from gradbox_worker.files.rounded_gradients import RoundedGradients
from gradbox_worker.work import Work

log = logging.getLogger(__name__)

Identity = Callable[[], Mapping[str, str]]

METADATA_KEY: Final = "gradbox_checkpoint"
SLOW_DISK_BYTES_PER_S: Final = 200 * 2**20


@dataclass(frozen=True)
class Pace:
    """How often checkpoints are written."""

    first_s: float = 60.0  # after the attempt began
    every_s: float = 30.0
    share: float = 0.03  # of the attempt's time

    @classmethod
    def after(cls, first_s: float) -> Pace:
        """Return a pace that begins so long after the attempt began, and goes on twice as often.

        At 0 a checkpoint is written after every shard, whatever that costs.
        """
        share = cls.share if first_s > 0 else math.inf
        return cls(first_s=first_s, every_s=first_s / 2, share=share)


class RowsInPlace(Protocol):
    """Rows that are not copied into a checkpoint: a `ResultOnDisk`, or what stands for it."""

    def keep(self, place: Path) -> str | None:
        """Flush them, and return the second name of their file; None if there are none."""

    def go_on(self, place: Path) -> bool:
        """Go on with those of an earlier attempt; False if that cannot be."""


class CheckpointFile:
    """The checkpoint of one job, for one attempt at it.

    Attributes:
        resumed: how often the job went on from a checkpoint, this attempt included.
    """

    def __init__(
        self,
        folder: Path,
        *,
        job_id: str,
        attempt: int | str,
        identity: Identity,
        disk_reserve_bytes: int | None = None,
        result: RowsInPlace | None = None,
        rounding: RoundedGradients | None = None,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin the attempt's time; touch no file.

        Args:
            folder: DATA/checkpoints.
            attempt: what no other process that may live calls its own files of this job.
            identity: returns what must be equal for a state to be used: the spec's digest, the
                model's version, the device, the versions of torch and gradbox. Few jobs ask.
            disk_reserve_bytes: what stays free on the disk, see `gradbox_service.store.Room`.
            result: the file in which rows may be written in place.
            rounding: what measured the rounding of those rows.
            clock: returns seconds.
        """
        self.resumed = 0
        self._folder, self._job_id = folder, job_id
        # An attempt that is thought dead may still write: never into another one's file.
        self._own = f"{job_id}.{attempt}"
        self._room = Room(folder, disk_reserve_bytes)
        self._result = result
        self._rounding = rounding or RoundedGradients("exact")
        self._identity = cache(identity)
        self._pace = pace or Pace()
        self._clock = clock
        self._began = self._written_at = clock()
        self._last_s = self._total_s = 0.0
        self._num_written = 0

    @property
    def _path(self) -> Path:
        return checkpoint_path(self._folder, self._job_id)

    def due(self) -> bool:
        """Return whether it is time to write the state."""
        wait_s = self._pace.every_s if self._num_written else self._pace.first_s
        return self._clock() - self._written_at >= wait_s and self._affordable()

    def write(self, checkpoint: Checkpoint) -> None:
        """Write the state in place of the one before, and flush the rows that it counts on.

        A full disk is logged and passed over. The first one waits until its share of the time is
        there.
        """
        began = self._clock()
        own, rows = (self._folder / f"{self._own}.{kind}" for kind in ("safetensors", "rows"))
        if not self._num_written:
            num_bytes = sum(x.numel() * x.element_size() for x in checkpoint.tensors.values())
            self._last_s = num_bytes / SLOW_DISK_BYTES_PER_S
            if not self._affordable():
                return
        try:
            kept = None if self._result is None else self._result.keep(rows)
            document = {
                "identity": dict(self._identity()),
                "resumed": self.resumed,
                "facts": checkpoint.facts,
                "names": list(checkpoint.tensors),
                "strides": strides_of(checkpoint.tensors),
                "rounding_error": self._rounding.error,
                "rows": kept,
                "rows_bytes": 0 if kept is None else (self._folder / kept).stat().st_size,
            }
            metadata = {METADATA_KEY: json.dumps(document)}
            write_result(own, checkpoint.tensors, metadata=metadata, room=self._room)
            with own.open("rb") as file:
                os.fsync(file.fileno())
            put_in_place(own, self._path)
        except (StorageFull, InvalidInputs, OSError) as error:
            log.warning("no checkpoint of %s: %s", self._job_id, error)
            own.unlink(missing_ok=True)
        self._written_at = self._clock()
        self._last_s = self._written_at - began
        self._total_s += self._last_s
        self._num_written += 1

    def _affordable(self) -> bool:
        """Return whether there is time for one more like the last."""
        ran_s = self._clock() - self._began
        return self._total_s + self._last_s <= self._pace.share * ran_s

    def read(self) -> Checkpoint | None:
        """Return the state that an earlier attempt left, on the CPU.

        Returns:
            None if there is none, or none that this attempt may go on from: another model version,
            another device, a file that is not whole, rows that another process still writes. What
            is of no use is removed.
        """
        left = files_of(self._folder, self._job_id)
        found = self._read() if self._path in left else None
        if found is None:
            _remove(left)
        return found

    def _read(self) -> Checkpoint | None:
        try:
            if not is_whole(self._path):
                log.warning("the checkpoint of %s has other bytes than were written", self._job_id)
                return None
            with safe_open(self._path, framework="pt") as file:
                document = json.loads((file.metadata() or {})[METADATA_KEY])
                if document["identity"] != self._identity():
                    log.info("the checkpoint of %s is of another kind of run", self._job_id)
                    return None
                strides = document["strides"]
                tensors = {  # copies, for the file is replaced while they live
                    name: laid_out(file.get_tensor(name), strides.get(name))
                    for name in document["names"]
                }
                found = Checkpoint(tensors, dict(document["facts"]))
                if not self._has_rows(document["rows"], document["rows_bytes"]):
                    log.info("the rows of %s are not whole, or still written to", self._job_id)
                    return None
                self._rounding.error = float(document["rounding_error"])
                self.resumed = int(document["resumed"]) + 1
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            log.warning("the checkpoint of %s cannot be read: %s", self._job_id, error)
            return None
        return found

    def remove(self) -> None:
        """Remove what attempts at the job kept."""
        _remove(files_of(self._folder, self._job_id))

    def _has_rows(self, name: str | None, num_bytes: int) -> bool:
        """Go on with the rows in place that a checkpoint counts on; False if that cannot be.

        Args:
            num_bytes: that their file had; a file that was cut short since is of no use.
        """
        if name is None:
            return True
        rows = self._folder / Path(name).name
        whole = rows.exists() and rows.stat().st_size >= num_bytes
        return whole and self._result is not None and self._result.go_on(rows)


class JobCheckpoints:
    """The checkpoints that one device writes of a job: of the whole, or of the ranges it has."""

    def __init__(
        self,
        work: Work,
        *,
        identity: Identity,
        rows: RowsInPlace,
        rounding: RoundedGradients,
        pace: Pace | None,
    ) -> None:
        """Touch no file.

        Args:
            identity, rows, rounding, pace: see `CheckpointFile`.
        """
        self._work, self._identity = work, identity
        self._rows, self._rounding, self._pace = rows, rounding, pace
        self._files: dict[str, CheckpointFile] = {}  # by shards

    @property
    def resumed(self) -> int:
        """How often the job, or a range of it, went on from a checkpoint, this time included."""
        return max((file.resumed for file in self._files.values()), default=0)

    def whole(self) -> Checkpoints:
        """Return where the state of a job in one range is kept; nowhere, if it is in memory."""
        if self._work.in_memory:
            return NoCheckpoints()
        return self._file("", identity=self._identity, attempt=self._work.attempt)

    def of(self, part: Range) -> Checkpoints:
        """Return where a range's state is kept, from now on."""
        return self.whole() if part.is_whole else self._of_shards(part)

    def of_samples(self, part: Range, task: SampleTask) -> Checkpoints:
        """Return the same of a range of samples, whose state depends on what is made of them."""
        kind = "others-" if task.of_others else ""
        return self._of_shards(part, kind=kind, made=f"{task.reduce}, {task.form}")

    def _of_shards(self, part: Range, *, kind: str = "", made: str = "") -> Checkpoints:
        shards = f"{kind}{part.start}-{part.stop}"

        def identity() -> dict[str, str]:
            return {**self._identity(), "shards": shards, "made": made}

        # Two devices of one attempt may have a range, one of which only seems dead.
        own = f"{self._work.attempt}-{uuid.uuid4().hex[:8]}"
        return self._file(f".{shards}", identity=identity, attempt=own)

    def _file(self, shards: str, *, identity: Identity, attempt: int | str) -> CheckpointFile:
        found = self._files[shards] = CheckpointFile(
            self._work.checkpoints,
            job_id=f"{self._work.job_id}{shards}",
            attempt=attempt,
            identity=identity,
            disk_reserve_bytes=self._work.disk_reserve_bytes,
            result=self._rows,
            rounding=self._rounding,
            pace=self._pace,
        )
        return found


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def checkpoint_path(folder: Path, job_id: str) -> Path:
    """Return where a job's checkpoint lies."""
    return folder / f"{job_id}.safetensors"
