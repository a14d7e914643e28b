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
from gradbox_engine import Observer
from gradbox_engine.per_sample import SampleResult, jacobian, per_sample_gradient
from gradbox_engine.requests import Phase
from gradbox_factors import relative_error
from gradbox_worker.computations.engine_inputs import build_function
from gradbox_worker.computations.factors import described, stored_rows
from gradbox_worker.computations.job import Computed, LoadedJob
from gradbox_worker.computations.sections import section
from gradbox_worker.files.result_in_place import ResultOnDisk

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
    answer = per_sample_gradient(
        job.loaded.module,
        job.groups[0].shards,
        build_function(spec.loss.function, job.tensors, device=job.device).function,
        loss_inputs=loss_inputs,
        reduce=spec.reduce,
        clip=spec.clip,
        **_shared(job, spec, progress, squeezed=True),
    )
    return _computed(spec, answer, {"samples/loss": answer.values})


def compute_jacobian(job: LoadedJob, spec: JacobianSpec) -> Computed:
    """Return dz_by/dθ of every sample and output."""
    vectors: Any = None
    if isinstance(spec.vectors, TensorRef):
        vectors = job.tensors.tensor(spec.vectors)
    elif spec.vectors is not None:
        vectors = {name: job.tensors.tensor(ref) for name, ref in spec.vectors.items()}
    progress = _Progress(job.observer)
    answer = jacobian(
        job.loaded.module,
        job.groups[0].shards,
        reduce=spec.reduce,
        vectors=vectors,
        **_shared(job, spec, progress, squeezed=False),
    )
    return _computed(spec, answer, {f"outputs/{job.groups[0].name}": answer.values})


def _shared(job: LoadedJob, spec: Spec, progress: _Progress, *, squeezed: bool) -> dict[str, Any]:
    to_file = spec.form != "factored" and spec.reduce == "none"
    return {
        "form": spec.form,
        "dim": spec.dim,
        "kind": spec.kind,
        "against": None if spec.against is None else stored_rows(job, of=spec.against),
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
        "sink": _DenseSink(job.result, progress, squeezed=squeezed) if to_file else None,
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
    """Hands a dense result's pieces to its file."""

    def __init__(self, result: ResultOnDisk, progress: _Progress, *, squeezed: bool) -> None:
        self._result, self._progress, self._squeezed = result, progress, squeezed

    def begin(
        self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        self._result.lay_out(
            {f"{GRADS}/{name}": shape for name, shape in shapes.items()},
            {f"{GRADS}/{name}": dtype for name, dtype in dtypes.items()},
            squeezed=self._squeezed,
        )

    def write(self, name: str, at: tuple[slice, slice, slice], piece: Tensor) -> None:
        self._progress.repeat()
        self._result.write(f"{GRADS}/{name}", at, piece)


def _computed(
    spec: Spec,
    answer: SampleResult,
    values: Mapping[str, Tensor | None],
) -> Computed:
    tensors = {name: value for name, value in values.items() if value is not None}
    metadata: Mapping[str, str] = {}
    if spec.reduce == "clipped_sum" or (spec.reduce == "vjp" and spec.against is None):
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
            "projection_kind": None if spec.dim is None else spec.kind,
            "projection_error": None if spec.dim is None else relative_error(spec.kind, spec.dim),
            "form": spec.form,
            "roads": {name: list(taken) for name, taken in answer.roads.items()},
            "loops": dict(answer.loops),
        },
        seconds={"samples": answer.seconds},
    )
