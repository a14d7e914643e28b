"""Which jobs are alike, so that what was measured of one says what another takes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from pydantic import BaseModel

from gradbox.errors import InvalidJob, OutOfMemory
from gradbox.protocol import (
    CotangentsLoss,
    EstimateView,
    HessianProductSpec,
    JobSpec,
    ModelView,
    ShardRef,
    StateSpec,
    StoreJobSpec,
    TensorRef,
)
from gradbox_service.admission.tensors import TensorHeaders
from gradbox_service.fleet import WorkerPresence
from gradbox_service.store.room import in_units

# What may differ among jobs that take as much.
IRRELEVANT: Final = frozenset(
    {
        "estimate", "model", "name", "priority", "timeout_s", "seed", "retain", "state", "against",
        "number", "lr", "clip_norm", "clip_value",
    }
)  # fmt: skip


def may_be_estimated(spec: JobSpec) -> bool:
    """Return whether a job is of a kind that is estimated.

    Not if its loss was computed elsewhere, if it reads or writes a run's state or a store, and not
    if it is of a curvature.

    Raises:
        InvalidJob: it is not, and is to be estimated all the same.
    """
    loss = getattr(spec, "loss", None)
    is_other = isinstance(spec, StateSpec | StoreJobSpec | HessianProductSpec) or isinstance(
        loss, CotangentsLoss
    )
    if spec.estimate and is_other:
        raise InvalidJob(
            "estimate: expected a computation with its loss, got one at cotangents, a curvature's, "
            "or one that reads or writes a run's state or a store: estimate the Gradient with a "
            "loss of the same outputs, or the PerSampleGradient whose rows are stored"
        )
    return not is_other


def estimate_key(spec: JobSpec, *, model: ModelView, tensors: TensorHeaders) -> str:
    """Return what a job has in common with those that take as much time and memory.

    That is the model's version, the computation with its functions and settings, and the dtypes and
    shapes of all tensors; how many shards there are of each shape, and not their order. Jobs on a
    run's weights are alike if it is the same run.
    """
    on_run = None if spec.state is None else spec.state.run
    fields = {name for name in type(spec).model_fields if name not in IRRELEVANT}
    alike = {name: _alike(getattr(spec, name), tensors) for name in sorted(fields)}
    text = json.dumps([model.version, on_run, alike], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_fits(kept: EstimateView | None, *, workers: Sequence[WorkerPresence]) -> None:
    """Check that a job may fit a device, by what was measured of its like.

    Raises:
        OutOfMemory: it did not fit a device, and none here has more memory than that one.
    """
    if kept is None or kept.fits:
        return
    memories = [worker.memory for worker in workers]
    if any(m is None or m.total_bytes > kept.device_bytes for m in memories):
        return
    raise OutOfMemory(
        f"expected the job to fit a device of this box, but one like it was estimated to take "
        f"{in_units(kept.peak_bytes)} or more at its peak, where {kept.device} has "
        f"{in_units(kept.most_bytes)} for it: {kept.advice}; if the box has changed since, "
        f"estimate the job again"
    )


def _alike(value: Any, tensors: TensorHeaders) -> Any:
    """Return a part of a spec as JSON, with the shapes of tensors in the place of their names."""
    if isinstance(value, TensorRef):
        return [value.requires_grad, tensors.forms(value)]
    if isinstance(value, ShardRef):
        return tensors.forms(value)
    if isinstance(value, BaseModel):
        names = type(value).model_fields
        return {name: _alike(getattr(value, name), tensors) for name in names}
    if isinstance(value, dict):
        return {name: _alike(item, tensors) for name, item in value.items()}
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], ShardRef):
            return sorted(Counter(tensors.forms(shard) for shard in value).items())
        return [_alike(item, tensors) for item in value]
    return value
