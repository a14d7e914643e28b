"""What is kept of jobs that others go on from, for as long as somebody holds their results.

A forward job is kept with its inputs, of which the gradient at cotangents is computed, and its
outputs, with which the replay is compared; one with rows of samples, with these. They are copies,
for the user may write to what was handed in and what was returned. Nothing else is kept of any job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import torch

from gradbox.protocol import ForwardSpec, JobSpec, SampleSpec
from gradbox.results.result_files import HeldTensors
from gradbox.tensors.blob import Blob
from gradbox.tensors.safetensors_header import TensorEntry
from gradbox_service.jobs import JobRecord

# A user may write to these, and not to factors, which a result multiplies out.
WRITABLE = ("outputs/", "grads/")


@dataclass(frozen=True, eq=False)
class EarlierJob:
    """One job that is done.

    Attributes:
        blobs: its inputs, if a job that goes on from it has the same.
        result: what it returned, whatever was written into the user's since.
    """

    record: JobRecord
    spec: JobSpec
    blobs: Mapping[str, Blob] = field(repr=False)
    result: HeldTensors

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """The forms of the tensors of its result; they lie nowhere in a file."""
        stored = self.result.stored.items()
        return {name: TensorEntry(form.dtype, form.shape, 0, 0) for name, form in stored}


class EarlierJobs:
    """The jobs of one client that others may go on from: `Recorded`, as admission asks for them."""

    def __init__(self) -> None:
        """Keep none yet."""
        self._jobs: WeakValueDictionary[str, EarlierJob] = WeakValueDictionary()

    def get(self, job_id: str) -> JobRecord | None:
        """Return a job's record; None if it is not kept."""
        found = self._jobs.get(job_id)
        return None if found is None else found.record

    def spec(self, job_id: str) -> JobSpec | None:
        """Return its spec."""
        found = self._jobs.get(job_id)
        return None if found is None else found.spec

    def job(self, job_id: str) -> EarlierJob:
        """Return a job that is kept."""
        return self._jobs[job_id]

    def keep(
        self, record: JobRecord, spec: JobSpec, blobs: Mapping[str, Blob], result: HeldTensors
    ) -> None:
        """Keep a job for as long as its result lives, if any job can go on from it."""
        is_forward = isinstance(spec, ForwardSpec)
        has_rows = isinstance(spec, SampleSpec) and spec.reduce == "none" and spec.form != "dense"
        if not (is_forward or has_rows):
            return
        tensors = {
            name: result.tensor(name).clone() if name.startswith(WRITABLE) else result.tensor(name)
            for name in result.names
        }
        own = HeldTensors(tensors, result.metadata)
        inputs = {digest: _copy(blob) for digest, blob in blobs.items()} if is_forward else {}
        job = EarlierJob(record, spec, inputs, own)
        self._jobs[record.id] = job
        result.job = job


def _copy(blob: Blob) -> Blob:
    copies = {}
    for name, tensor in blob.tensors.items():
        source = tensor.source
        copy = source.detach().clone() if isinstance(source, torch.Tensor) else source.copy()
        copies[name] = replace(tensor, source=copy)
    return Blob(copies)
