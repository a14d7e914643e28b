"""Cotangents at a scale that float16 can hold.

float16 ends at 6e-8 below and 65504 above. A replay under its autocast, or of a model that has such
parameters, multiplies all cotangents by one power of two that lifts the largest entry to about 256,
and divides the sums by it; where a gradient overflows all the same, the replay is repeated at a
64th of the scale, ten times at most. What overflows even then is infinite in any precision: the
last replay has the first scale again, at which other gradients have all their digits.

All cotangents have one scale: what is below 1e-7 of the largest loses digits, then is zero.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.precision import fp16_scale, passes_float16
from gradbox_engine.model.prepared import Prepared
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.replay import AfterShard, ReplayProgress, replay
from gradbox_engine.replay.shard_record import ShardRecord
from gradbox_engine.requests import Observer

LARGEST = 2.0**8
STEP = 2.0**-6
MOST_STEPS = 10


def scaled_replay(
    prepared: Prepared,
    records: Sequence[ShardRecord],
    cotangents: Mapping[Position, Outputs],
    sums: GradientSums,
    *,
    observer: Observer,
    resumed: Checkpoint | None,
    after_shard: AfterShard,
) -> ReplayProgress:
    """Replay, see `replay`; through float16 at a scale, and again at smaller ones if needed.

    Args:
        resumed: how far an earlier process came, at whose scale the sums are.
    """
    progress = None if resumed is None else ReplayProgress.of(resumed)
    once = partial(
        replay,
        prepared,
        records,
        cotangents,
        sums,
        observer=observer,
        after_shard=after_shard,
    )
    entries = [tensor for part in cotangents.values() for tensor in part.values()]
    scaled = passes_float16(prepared.model, prepared.options.precision)
    if not scaled or not _finite(entries):
        return once(resumed=progress)
    first = fp16_scale(entries, largest=LARGEST)
    if resumed is None:
        sums.scale = first
    for _ in range(MOST_STEPS + 1):
        replayed = once(resumed=progress)
        inputs = [g for named in replayed.input_grads.values() for g in named.values()]
        if sums.finite() and _finite(g for g in inputs if g is not None):
            return replayed
        sums.clear()
        sums.scale *= STEP
        progress = None
    sums.scale = first
    return once(resumed=None)


def _finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
