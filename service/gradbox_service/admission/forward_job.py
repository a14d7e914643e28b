"""Cotangents and the forward job that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from gradbox.errors import InvalidInputs, UnknownModel
from gradbox.protocol import (
    CotangentGradientSpec,
    CotangentsLoss,
    CotangentStepSpec,
    ForwardSpec,
    RunOptions,
    SetLossSpec,
    SharedSpec,
    option_names,
)
from gradbox.tensors.safetensors_header import TensorEntry
from gradbox_service.accounting.blob_owners import OwnBlobs
from gradbox_service.admission.earlier_job import earlier_job, result_gone, result_header
from gradbox_service.admission.tensors import FLOATING, TensorHeaders
from gradbox_service.backing import Backing
from gradbox_service.jobs import JobRecord

OUTPUTS: Final = "outputs/"
WHERE: Final = "loss.forward"
KIND: Final = "forward job"
# What a job says for itself, whatever job it continues.
OWN: Final = option_names(RunOptions) | {"protocol"}

Whole = TypeVar("Whole", bound=SetLossSpec)


@dataclass(frozen=True)
class ForwardJob:
    """A forward job that is done: its record, its spec and the form of its outputs by name."""

    record: JobRecord
    spec: ForwardSpec
    outputs: Mapping[str, TensorEntry]

    def complete(
        self, posted: CotangentGradientSpec | CotangentStepSpec, kind: type[Whole], **of_run: Any
    ) -> Whole:
        """Return the whole spec: all that decided the outputs is this job's.

        Args:
            of_run: fields that a step has from its run.
        """
        settled = {field: getattr(self.spec, field) for field in set(SharedSpec.model_fields) - OWN}
        own = {field: getattr(posted, field) for field in type(posted).model_fields}
        model = f"{self.record.model}@{self.record.model_version}"
        return kind(**(settled | own | {"model": model} | of_run))

    def outlived(self) -> UnknownModel:
        """Return the error of a box that has another version of its model by now, or none."""
        record = self.record
        return UnknownModel(
            f"loss.forward: expected the model that job {record.id} ran, "
            f"{record.model}@{record.model_version[:12]}, but the box does not have it any more; "
            f"run the forward job again (with client.model: call the model again)"
        )

    def check(self, loss: CotangentsLoss, *, blobs: OwnBlobs, box: Backing) -> None:
        """Check the cotangents against the outputs, and that these are here still.

        Raises:
            InvalidInputs: one is of no output, is not floating-point or has another shape; or the
                outputs have gone.
            MissingBlobs: the box does not have them.
        """
        if not box.results.touch(self.record.id, attempt=self.record.attempt):
            raise result_gone(self.record, where=WHERE, kind=KIND)
        tensors = TensorHeaders.load({ref.blob for ref in loss.tensors.values()}, blobs=blobs)
        for name, reference in loss.tensors.items():
            entry = tensors.entry(reference, where=f"loss.tensors.{name}")
            output = self.outputs.get(name)
            if output is None:
                raise InvalidInputs(
                    f"loss.tensors: expected cotangents of the outputs {sorted(self.outputs)[:8]} "
                    f"of job {self.record.id}, got one of {name!r}"
                )
            if entry.dtype not in FLOATING or entry.shape != output.shape:
                raise InvalidInputs(
                    f"loss.tensors.{name}: expected floating-point cotangents of the shape that "
                    f"the output has, {list(output.shape)}, got {entry.dtype} "
                    f"{list(entry.shape)}; they are dL/dZ at the outputs of job {self.record.id}"
                )


def forward_job(job_id: str, *, owner: str, box: Backing) -> ForwardJob:
    """Return the owner's forward job.

    Raises:
        InvalidInputs: there is none of that id, it is not done, or its outputs are not there.
    """
    record, spec = earlier_job(job_id, where=WHERE, kind=KIND, owner=owner, box=box)
    if not isinstance(spec, ForwardSpec):
        raise InvalidInputs(
            f"loss.forward: expected a forward job, got job {job_id}, which is a "
            f"{record.computation}; cotangents belong to the outputs of a forward job"
        )
    header = result_header(record, where=WHERE, kind=KIND, box=box)
    outputs = {
        name.removeprefix(OUTPUTS): entry
        for name, entry in header.tensors.items()
        if name.startswith(OUTPUTS)
    }
    if not outputs:
        raise InvalidInputs(
            f"loss.forward: expected job {job_id} to have returned outputs, it returned "
            f"{spec.returns}; the replay is compared with them"
        )
    return ForwardJob(record, spec, outputs)
