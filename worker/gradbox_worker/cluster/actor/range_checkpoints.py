"""Checkpoints of a wide job: a file for each range, DATA/checkpoints/JOB.START-STOP.safetensors.

Of ranges of the other shards that rows are multiplied with it is JOB.others-START-STOP.safetensors.

The device that has a range writes them, as a whole job's are written, if it sees the box's data
folder. Another attempt whose ranges have the same shards goes on from them, and so does the device
that takes a range over from one that died.

Dense rows stay in place in the one result file. The devices that write them flush it and give it a
second name, DATA/checkpoints/JOB.ATTEMPT.rows. Another attempt's coordinator goes on with that file
and says so to its devices, which begin again where they were to count on rows of any other one.
"""

from __future__ import annotations

import uuid
from functools import partial
from typing import Final

import torch

from gradbox_engine import Checkpoints
from gradbox_engine.checkpoint import NoCheckpoints
from gradbox_engine.ranges import Range
from gradbox_engine.ranges.samples import SampleTask
from gradbox_service.store.files import files_of
from gradbox_worker.cluster.exchange.sent_tensors import RangeJob
from gradbox_worker.computations.checkpoints import CheckpointFile, Pace, RowsInPlace
from gradbox_worker.computations.receipts import identity_of
from gradbox_worker.files.result_in_place import ResultOnDisk
from gradbox_worker.files.rounded_gradients import RoundedGradients
from gradbox_worker.work import Work

ROWS: Final = ".rows"


class RangeCheckpoints:
    """The checkpoints of the ranges that one device has."""

    def __init__(
        self,
        job: RangeJob,
        *,
        devices: tuple[torch.device, ...],
        rows: RowsInPlace | None = None,
        rounding: RoundedGradients | None = None,
    ) -> None:
        """Touch no file.

        Args:
            devices: of the model.
            rows: the file in which rows may be written in place.
            rounding: what measures the rounding of those.
        """
        self._rows, self._rounding = rows, rounding
        self._job = job
        self._identity = identity_of(job.work.spec_digest, job.work.model_version, devices)
        self._files: dict[int, CheckpointFile] = {}

    def of_samples(self, part: Range, task: SampleTask) -> Checkpoints:
        """Return the same of a range of samples, whose state depends on what is made of them."""
        kind = "others-" if task.of_others else ""
        return self.of(part, kind=kind, made=f"{task.reduce}, {task.form}")

    def of(self, part: Range, *, kind: str = "", made: str = "") -> Checkpoints:
        """Return where a range's state is kept, from now on."""
        job, shards = self._job, f"{kind}{part.start}-{part.stop}"
        if job.checkpoints is None:
            return NoCheckpoints()
        after_s = job.checkpoint_after_s
        found = self._files[part.index] = CheckpointFile(
            job.checkpoints,
            job_id=f"{job.work.job_id}.{shards}",
            attempt=f"{job.work.attempt}-{uuid.uuid4().hex[:8]}",
            identity=partial(dict, self._identity, shards=shards, made=made),
            disk_reserve_bytes=job.work.disk_reserve_bytes,
            result=self._rows,
            rounding=self._rounding,
            pace=None if after_s is None else Pace.after(after_s),
        )
        return found

    def resumed(self, index: int) -> int:
        """Return how often a range went on from a checkpoint, this time included."""
        found = self._files.get(index)
        return 0 if found is None else found.resumed


def file_with_rows(work: Work, result: ResultOnDisk) -> str:
    """Return the second name of a job's result file, having gone on with an earlier attempt's."""
    for path in files_of(work.checkpoints, work.job_id):
        if path.suffix == ROWS and result.go_on(path):
            return path.name
    return f"{work.job_id}.{work.attempt}{ROWS}"
