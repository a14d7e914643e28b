"""`PerSampleGradient` and `Jacobian`: rows for every sample, or what they are reduced to.

Sections of the file beside `grads`: `samples/…` holds what there is one of for each sample,
`norms/NAME` the norms by parameter, `factors/…` the tensors that the terms in the metadata name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradbox.protocol import JacobianSpec, PerSampleGradientSpec, TensorRef
from gradbox_engine import Group, Observer
from gradbox_engine.per_sample import (
    OtherShards,
    SampleResult,
    jacobian,
    per_sample_gradient,
)
from gradbox_engine.requests import Phase
from gradbox_factors import Factored, relative_error
from gradbox_worker.computations.engine_inputs import build_function
from gradbox_worker.computations.factors import described, stored_rows
from gradbox_worker.computations.job import Computed, LoadedJob
from gradbox_worker.computations.sections import section

# The engine's budget is for pieces and, half as much, for the output gradients they are made of.
ENGINE_SHARE = 0.5
GRADS = "grads"

Spec = PerSampleGradientSpec | JacobianSpec


def compute_gradient(job: LoadedJob, spec: PerSampleGradientSpec) -> Computed:
    """Return dℓ_b/dθ of every sample."""
    loss_inputs = {
        name: job.tensors.tensor(value) if isinstance(value, TensorRef) else value
        for name, value in spec.loss_inputs.items()
    }
    progress = _Progress(job.observer)
    rows, _ = _groups(job, spec)
    answer = per_sample_gradient(
        job.loaded.module,
        rows.shards,
        build_function(spec.loss.function, job.tensors, device=job.device).function,
        loss_inputs=loss_inputs,
        reduce=spec.reduce,
        clip=spec.clip,
        **_shared(job, spec, progress, squeezed=True),
    )
    values = {"samples/loss": answer.values, "samples/against_loss": answer.other_values}
    return _computed(spec, answer, values)


def compute_jacobian(job: LoadedJob, spec: JacobianSpec) -> Computed:
    """Return dz_by/dθ of every sample and output."""
    vectors: Any = None
    if isinstance(spec.vectors, TensorRef):
        vectors = job.tensors.tensor(spec.vectors)
    elif spec.vectors is not None:
        vectors = {name: job.tensors.tensor(ref) for name, ref in spec.vectors.items()}
    progress = _Progress(job.observer)
    rows, others = _groups(job, spec)
    answer = jacobian(
        job.loaded.module,
        rows.shards,
        reduce=spec.reduce,
        vectors=vectors,
        **_shared(job, spec, progress, squeezed=False),
    )
    values = {f"outputs/{rows.name}": answer.values}
    if others is not None:
        values[f"outputs/{others.name}"] = answer.other_values
    return _computed(spec, answer, values)


def _groups(job: LoadedJob, spec: Spec) -> tuple[Group, Group | None]:
    """Return the group whose rows are wanted, and the one whose rows they are multiplied with."""
    named = {group.name: group for group in job.groups}
    others = None if spec.against_group is None else named.pop(spec.against_group)
    (rows,) = named.values()
    return rows, others


def _against(job: LoadedJob, spec: Spec) -> Factored | OtherShards | None:
    if spec.against is not None:
        return stored_rows(job, of=spec.against)
    _, others = _groups(job, spec)
    if others is None:
        return None
    given = spec.against_loss_inputs if isinstance(spec, PerSampleGradientSpec) else {}
    return OtherShards(others.shards, {n: job.tensors.tensor(ref) for n, ref in given.items()})


def _streams(job: LoadedJob, spec: Spec) -> list[tuple[int, int]]:
    """Return the shards' streams in the order in which they run: other ones first."""
    rows, others = _groups(job, spec)
    return [*((others and others.streams) or ()), *(rows.streams or ())]


def _shared(job: LoadedJob, spec: Spec, progress: _Progress, *, squeezed: bool) -> dict[str, Any]:
    to_file = spec.form != "factored" and spec.reduce == "none"
    return {
        "form": spec.form,
        "dim": spec.dim,
        "kind": spec.kind,
        "against": _against(job, spec),
        "streams": _streams(job, spec),
        "seed": spec.seed,
        "projection_seed": spec.seed,
        "mode": spec.mode,
        "wrt": spec.wrt,
        "precision": spec.precision,
        "output": spec.output,
        "readout": job.readout,
        "weights": job.weights,
        "method": job.groups[0].method,
        "unchecked": spec.unchecked,
        "observer": progress,
        "checkpoints": job.checkpoints,
        "budget_bytes": int(job.result_memory_bytes * ENGINE_SHARE),
        "sink": _DenseSink(job, progress, squeezed=squeezed) if to_file else None,
    }


class _Progress:
    """Passes steps on; repeats the last one where a shard takes long, so that a stop is heard."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._last: tuple[Phase, int, int] | None = None

    def step(self, phase: Phase, done: int, total: int) -> None:
        self._last = (phase, done, total)
        self._observer.step(phase, done, total)

    def repeat(self) -> None:
        """Ask whether to stop."""
        if self._last is not None:
            self._observer.step(*self._last)


class _DenseSink:
    """Hands a dense result's pieces to its file, in the format of the job's transfer."""

    def __init__(self, job: LoadedJob, progress: _Progress, *, squeezed: bool) -> None:
        self._result, self._rounding = job.result, job.rounding
        self._progress, self._squeezed = progress, squeezed

    def begin(
        self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        self._result.lay_out(
            {f"{GRADS}/{name}": shape for name, shape in shapes.items()},
            {
                f"{GRADS}/{name}": self._rounding.stored_dtype(f"{GRADS}/{name}", dtype)
                for name, dtype in dtypes.items()
            },
            squeezed=self._squeezed,
        )

    def write(self, name: str, at: tuple[slice, slice, slice], piece: Tensor) -> None:
        self._progress.repeat()
        rows = self._rounding.rounded_rows(f"{GRADS}/{name}", piece)
        self._result.write(f"{GRADS}/{name}", at, rows)


def _computed(
    spec: Spec,
    answer: SampleResult,
    values: Mapping[str, Tensor | None],
) -> Computed:
    tensors = {name: value for name, value in values.items() if value is not None}
    metadata: Mapping[str, str] = {}
    if spec.reduce == "clipped_sum" or (
        spec.reduce == "vjp" and (spec.against or spec.against_group) is None
    ):
        tensors |= section(GRADS, answer.arrays)
    else:
        tensors |= section("samples", answer.arrays)
    if spec.reduce == "gram_trace":
        tensors["samples/gram_trace"] = tensors.pop("samples/gram")
    if spec.reduce == "clipped_sum":
        tensors["samples/norm"] = answer.parameter_norms[""]
    else:
        tensors |= section("norms", answer.parameter_norms)
    if answer.factors is not None:
        named, metadata = described(answer.factors)
        tensors |= named
    return Computed(
        tensors=tensors,
        metadata=metadata,
        facts={
            "names": answer.names,
            "unreached": list(answer.unreached),
            "samples": answer.samples,
            "outputs": answer.outputs,
            "reduce": spec.reduce,
            "against": spec.against,
            "against_group": spec.against_group,
            "projection_kind": None if spec.dim is None else spec.kind,
            "projection_error": None if spec.dim is None else relative_error(spec.kind, spec.dim),
            "form": spec.form,
            "roads": {name: list(taken) for name, taken in answer.roads.items()},
            "loops": dict(answer.loops),
        },
        seconds={"samples": answer.seconds},
    )
