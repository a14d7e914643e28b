"""Cotangents at a scale that float16 can hold.

float16 ends at 6e-8 below and 65504 above. A replay under its autocast, or of a model that has such
parameters, multiplies all cotangents by one power of two that lifts the largest entry to about 256,
and divides the sums by it; where a gradient overflows all the same, the replay is repeated at a
64th of the scale, ten times at most: what is not finite in any precision stays so.

All cotangents have one scale: what is below 1e-7 of the largest loses digits, then is zero.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.model.outputs import Outputs
from gradbox_engine.model.precision import fp16_scale, passes_float16
from gradbox_engine.model.prepared import Prepared
from gradbox_engine.model.shard_feed import Position
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
    if not passes_float16(prepared.model, prepared.options.precision):
        return once(resumed=progress)
    if resumed is None:
        entries = (tensor for part in cotangents.values() for tensor in part.values())
        sums.scale = fp16_scale(entries, largest=LARGEST)
    return repeated_until_finite(once, sums, progress)


def repeated_until_finite(
    replay: Callable[..., ReplayProgress], sums: GradientSums, resumed: ReplayProgress | None
) -> ReplayProgress:
    """Replay, and again at a smaller scale for as long as a gradient overflows."""
    for _ in range(MOST_STEPS):
        replayed = replay(resumed=resumed)
        if _finite(sums, replayed):
            return replayed
        sums.clear()
        sums.scale *= STEP
        resumed = None
    return replay(resumed=resumed)


def _finite(sums: GradientSums, replayed: ReplayProgress) -> bool:
    inputs = [g for named in replayed.input_grads.values() for g in named.values()]
    return sums.finite() and all(bool(g.isfinite().all()) for g in inputs if g is not None)
