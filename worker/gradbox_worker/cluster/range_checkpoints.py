"""Checkpoints of a wide job: a file for each range, DATA/checkpoints/JOB.START-STOP.safetensors.

The device that has a range writes them, as a whole job's are written, if it sees the box's data
folder. Another attempt whose ranges have the same shards goes on from them, and so does the device
that takes a range over from one that died.
"""

from __future__ import annotations

import uuid
from functools import partial

import torch

from gradbox.protocol import spec_digest
from gradbox.protocol.spec import JOB_SPEC
from gradbox_engine import Checkpoints
from gradbox_engine.checkpoint import NoCheckpoints
from gradbox_engine.ranges import Range
from gradbox_worker.cluster.sent_tensors import RangeJob
from gradbox_worker.computations.checkpoints import CheckpointFile, Pace
from gradbox_worker.computations.receipts import gradbox_version, kind_of


class RangeCheckpoints:
    """The checkpoints of the ranges that one device has."""

    def __init__(self, job: RangeJob, *, devices: tuple[torch.device, ...]) -> None:
        """Touch no file.

        Args:
            devices: of the model.
        """
        self._job = job
        self._identity = {
            "spec": spec_digest(JOB_SPEC.validate_json(job.spec)),
            "model": job.model_version,
            "device": kind_of(*devices),
            "torch": torch.__version__,
            "gradbox": gradbox_version(),
        }
        self._files: dict[int, CheckpointFile] = {}

    def of(self, part: Range) -> Checkpoints:
        """Return where a range's state is kept, from now on."""
        job, shards = self._job, f"{part.start}-{part.stop}"
        if job.checkpoints is None:
            return NoCheckpoints()
        after_s = job.checkpoint_after_s
        found = self._files[part.index] = CheckpointFile(
            job.checkpoints,
            job_id=f"{job.job_id}.{shards}",
            attempt=f"{job.attempt}-{uuid.uuid4().hex[:8]}",
            identity=partial(dict, self._identity, shards=shards),
            disk_reserve_bytes=job.disk_reserve_bytes,
            pace=None if after_s is None else Pace.after(after_s),
        )
        return found

    def resumed(self, index: int) -> int:
        """Return how often a range went on from a checkpoint, this time included."""
        found = self._files.get(index)
        return 0 if found is None else found.resumed
