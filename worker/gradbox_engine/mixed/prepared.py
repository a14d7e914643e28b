"""A frozen model made ready for one mixed gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn

from gradbox_engine.mixed.inner import Inner
from gradbox_engine.mixed.jacobian_products import ShardJacobians
from gradbox_engine.model.kernels import differentiable_kernels
from gradbox_engine.model.prepared import Prepared, prepared
from gradbox_engine.model.wrt import Selection, refuse_unusable
from gradbox_engine.replay.cotangents import trainable
from gradbox_engine.requests import (
    CallKeywords,
    CallOptions,
    Group,
    Objective,
    Observer,
    Silent,
)

NOTHING = Selection({}, {})
"""No parameter of G is differentiated."""


@dataclass(frozen=True)
class PreparedMixed:
    """A model made ready for one job, and everything that puts shards through it."""

    ready: Prepared
    jacobians: ShardJacobians
    inner: Inner
    observer: Observer


@contextmanager
def prepared_mixed(
    model: nn.Module,
    group: Group,
    inner: Objective,
    leaves: Mapping[str, Tensor],
    *,
    z: str | None,
    observer: Observer | None,
    **options: Unpack[CallKeywords],
) -> Iterator[PreparedMixed]:
    """Make a model ready; it is bit-identical afterwards.

    The arguments are those of `mixed_gradient`; `leaves` is y by name.
    """
    refuse_unusable(model)
    call_options = CallOptions(**options).without_penalties("mixed_gradient")
    with (
        prepared(model, [group], NOTHING, call_options) as ready,
        trainable(leaves, widened=call_options.widened),
        differentiable_kernels(model.modules()),
    ):
        yield PreparedMixed(
            ready=ready,
            jacobians=ShardJacobians(ready, argument=z, scaled=ready.in_float16),
            inner=Inner(
                inner, device=ready.device, seed=call_options.seed, widened=call_options.widened
            ),
            observer=observer or Silent(),
        )
