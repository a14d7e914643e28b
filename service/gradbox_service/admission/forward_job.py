"""Cotangents and the forward job that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from gradbox.errors import InvalidInputs, UnknownModel
from gradbox.protocol import (
    CotangentGradientSpec,
    CotangentsLoss,
    CotangentStepSpec,
    ForwardSpec,
    JobSpec,
    RunOptions,
    SetLossSpec,
    SharedSpec,
    option_names,
)
from gradbox.tensors.safetensors_header import TensorEntry
from gradbox_service.admission.earlier_job import earlier_job, result_gone, result_header
from gradbox_service.admission.tensors import FLOATING, Headers, TensorHeaders
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

    @classmethod
    def of(
        cls, record: JobRecord, spec: JobSpec, tensors: Callable[[], Mapping[str, TensorEntry]]
    ) -> ForwardJob:
        """Return a job as a forward job.

        Args:
            tensors: returns the form of all tensors of its result.

        Raises:
            InvalidInputs: it is none, or has returned no outputs.
        """
        if not isinstance(spec, ForwardSpec):
            raise InvalidInputs(
                f"loss.forward: expected a forward job, got job {record.id}, which is a "
                f"{record.computation}; cotangents belong to the outputs of a forward job"
            )
        outputs = {
            name.removeprefix(OUTPUTS): entry
            for name, entry in tensors().items()
            if name.startswith(OUTPUTS)
        }
        if not outputs:
            raise InvalidInputs(
                f"loss.forward: expected job {record.id} to have returned outputs, it returned "
                f"{spec.returns}; the replay is compared with them"
            )
        return cls(record, spec, outputs)

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

    def check_kept(self, *, box: Backing) -> None:
        """Check that a box has the outputs still, which are kept longer for being used.

        Raises:
            InvalidInputs: they have gone.
        """
        if not box.results.touch(self.record.id, attempt=self.record.attempt):
            raise result_gone(self.record, where=WHERE, kind=KIND)

    def check(self, loss: CotangentsLoss, *, blobs: Headers) -> None:
        """Check the cotangents against the outputs.

        Raises:
            InvalidInputs: one is of no output, is not floating-point or has another shape.
            MissingBlobs: they are not there.
        """
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
    record, spec = earlier_job(job_id, where=WHERE, kind=KIND, owner=owner, records=box.records)

    def tensors() -> Mapping[str, TensorEntry]:
        return result_header(record, where=WHERE, kind=KIND, box=box).tensors

    return ForwardJob.of(record, spec, tensors)
