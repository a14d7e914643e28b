"""`split_mixed_gradient`: one mixed gradient over ranges of its shards, wherever these run.

    each range r:   dfdz_i = ∂inner(y, G(z_i))/∂z_i, i in r                RangeDevice.forward
    here:           t = outer(dfdz_1 … dfdz_N, x),  u = ∂t/∂dfdz
    each range r:   Σ_{i in r} ∂⟨a_i(y, v_i), J_i u_i⟩/∂y                  RangeDevice.replay
    in a tree:      the sum over ranges                                    Devices.added

∂outer/∂y is what the sum of range 0 begins with, so that with one range the result has the bits of
`mixed_gradient`.

Cost: that of `mixed_gradient` divided among the devices, and for every range but the first at most
one forward more, see `independence`. Moved: dfdz and u once, and a sum a range.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch

from gradbox_engine.mixed.outer import OuterDifferentiated, outer_at
from gradbox_engine.mixed.tangents import largest_product
from gradbox_engine.model.calling.outputs import BARE
from gradbox_engine.model.calling.shard_rng import generators_restored
from gradbox_engine.model.kernels import differentiable_kernels
from gradbox_engine.model.precision import arithmetic
from gradbox_engine.ranges.joining import joined, joined_rows, range_cotangents
from gradbox_engine.ranges.mixed.held_mixed import DirectionsOfRange, RangeTangents
from gradbox_engine.ranges.protocol import HOST, Devices, Range, RangeOutputs
from gradbox_engine.ranges.reduction import completed
from gradbox_engine.ranges.split_job import RangeRun, SplitJob
from gradbox_engine.replay.phase_timer import PhaseTimer
from gradbox_engine.replay.z import ShardRows
from gradbox_engine.requests import (
    CallKeywords,
    CallOptions,
    Group,
    MixedResult,
    MixedReturned,
    Objective,
    Observer,
    Silent,
)


@dataclass(frozen=True, kw_only=True)
class SplitMixed(MixedResult):
    """What `mixed_gradient` returns, and the ranges that it was computed in."""

    ranges: tuple[RangeRun, ...]


def split_mixed_gradient(
    devices: Devices,
    parts: Sequence[Range],
    group: Group,
    outer: Objective,
    *,
    returns: Collection[MixedReturned] = (),
    device: torch.device = HOST,
    observer: Observer | None = None,
    **options: Unpack[CallKeywords],
) -> SplitMixed:
    """Return dt/dy; the arguments are those of `mixed_gradient` and of `split_set_gradient`.

    Args:
        devices: each holds the job ready, see `held_mixed`.
        outer: runs here.

    Raises:
        CoupledShards: the shards cannot be split; the job needs one range.
        DeviceLost: no device is left, or one range has lost too many.
        EngineError: see `mixed_gradient`.
    """
    call_options, observer, clock = CallOptions(**options), observer or Silent(), PhaseTimer(device)
    job = SplitJob(devices, parts, [group], precision=call_options.precision, observer=observer)
    with clock.timed("forward"):
        gathered = job.forward()
    with clock.timed("cotangents"):
        observer.step("cotangents", 0, 1)
        found, directions = _directions(gathered, parts, group, outer, call_options, device=device)
        observer.step("cotangents", 1, 1)
    with clock.timed("replay"):
        tangents = job.replay(directions)
        sums = job.total()
    parameters = tangents[0].parameters
    fallbacks: Counter[str] = Counter()
    for of_range in tangents:
        assert isinstance(of_range, RangeTangents)
        fallbacks.update(of_range.fallbacks)
    return SplitMixed(
        value=found.value,
        grads=completed(sums, parameters),
        unreached=tuple(name for name in parameters if name not in sums),
        shards={group.name: len(group.shards)},
        tangents=sum(of_range.replayed for of_range in tangents),
        fallbacks=dict(fallbacks),
        replay_difference=max(of_range.replay_difference for of_range in tangents),
        seconds=clock.seconds,
        dfdz=found.dfdz if "dfdz" in returns else None,
        ranges=job.runs(),
    )


def _directions(
    gathered: Sequence[RangeOutputs],
    parts: Sequence[Range],
    group: Group,
    outer: Objective,
    options: CallOptions,
    *,
    device: torch.device,
) -> tuple[OuterDifferentiated, list[DirectionsOfRange]]:
    """Return t and its derivatives, and what each range needs of them."""
    groups = [group]
    rows = [outputs.rows for outputs in gathered]
    shard_rows = ShardRows(groups, joined_rows(groups, rows))
    dfdz = joined(groups, gathered, device=device)
    with (
        torch.inference_mode(False),
        generators_restored(),
        arithmetic(options.precision),
        differentiable_kernels(),
    ):
        found = outer_at(dfdz, group, shard_rows, outer, options=options, device=device)
    of_shard = {position: part[BARE] for position, part in shard_rows.parts(dfdz).items()}
    largest = largest_product(of_shard, found.directions)
    asked = range_cotangents(
        groups,
        parts,
        rows,
        {group.name: {BARE: found.whole_directions}},
        found.directions,
        norms=[outputs.norms for outputs in gathered],
    )
    return found, [
        DirectionsOfRange(
            **vars(of_range),
            largest=largest.cpu(),
            direct={n: g.cpu() for n, g in found.direct.items()} if part.index == 0 else {},
        )
        for part, of_range in zip(parts, asked, strict=True)
    ]
