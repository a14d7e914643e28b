"""State in a job over several ranges: running statistics of batch norm compose, nothing else may.

Every range begins with the registered buffers S₀. That gives the right z only if no output depends
on a buffer that shards change. Batch norm in training mode is such a case: it normalises by the
shard's own statistics, and its running ones are written and not read. One update of them is an
affine map, s ← (1 − m) s + m x, and so are c of them in a row, with slope a = (1 − m)ᶜ. What a
range made of S₀ therefore tells what it makes of any T:

    T′ = S + a (T − S₀)                                        momentum m
    T′ = [(N₀ + c) S + N T − N₀ S₀] / (N + c)                  momentum None, an average of all

with N₀, N the number of batches in S₀ and T, and c of them in the range. Exact but for rounding. A
batch without samples is counted, and no update is made: such a range is composed with no other.

Any other buffer that changes is refused, and so are numbers kept as attributes or inside them,
hooks and submodules: `updates`. That no output depends on the running ones is not taken for granted
either: see `independence`.

Not supported: running statistics of instance norm, which counts no batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gradbox_engine.errors import CoupledShards
from gradbox_engine.model.prepared import Prepared
from gradbox_engine.model.state.buffers import Buffers, Live, Slot, Snapshot
from gradbox_engine.model.state.model_state import AS_REGISTERED
from gradbox_engine.model.tensor_equality import (
    equal_numbers,
    form,
    is_plain,
    same_values,
)
from gradbox_engine.ranges.protocol import NormStatistics, NormUpdate, RangeOutputs
from gradbox_engine.replay.shard_record import ShardRecord
from gradbox_engine.torch_private import BatchNorm

MEAN, VAR, COUNT = "running_mean", "running_var", "num_batches_tracked"

ONE_DEVICE = (
    "shards of this job cannot run side by side; run it on one device, which takes them in order"
)


def updates(ready: Prepared, records: Sequence[ShardRecord]) -> dict[str, NormUpdate]:
    """Return what a range did to the running statistics of batch norms, by module.

    Raises:
        CoupledShards: a shard changed any other buffer, a number kept as an attribute or inside
            one, or hooks or submodules.
    """
    _refuse_beyond_buffers(ready.buffers, records)
    norms = {
        name: module
        for name, module in ready.model.named_modules()
        if isinstance(module, BatchNorm) and module.training
    }
    composable = {(name, buffer) for name in norms for buffer in (MEAN, VAR, COUNT)}
    changed: set[Slot] = set()
    left_out: set[str] = set()
    for before, after in pairwise([records[0].before, *(record.after for record in records)]):
        by_shard = _changed(before.values, after.values)
        changed |= by_shard
        counted = {module for module, buffer in by_shard if buffer == COUNT}
        left_out |= counted - {module for module, buffer in by_shard if buffer in (MEAN, VAR)}
        for module, buffer in sorted(changed - composable):
            raise CoupledShards(
                f"buffer {_join(module, buffer)!r}: expected none but running statistics of batch "
                f"norm to change from shard to shard, since each device begins with the registered "
                f"buffers; {ONE_DEVICE}",
                name=_join(module, buffer),
            )
    first, last = records[0].before.values, records[-1].after.values
    return {
        name: NormUpdate(
            norms[name].momentum,
            statistics_of(first, name),
            statistics_of(last, name),
            left_out=name in left_out and norms[name].momentum != 0,
        )
        for name in norms
        if changed & {(name, MEAN), (name, VAR), (name, COUNT)}
    }


def _refuse_beyond_buffers(buffers: Buffers, records: Sequence[ShardRecord]) -> None:
    expected = (
        f"expected none to change from shard to shard, since each device begins with the "
        f"registered ones; {ONE_DEVICE}"
    )
    for record in records:
        beyond = record.after.beyond or AS_REGISTERED
        for name in beyond.names:
            raise CoupledShards(f"attribute {name!r}: {expected}", name=name)
        if beyond.kept:
            raise CoupledShards(f"hooks, submodules or their classes: {expected}")
    if buffers.beyond.in_order or buffers.beyond.lacks_counts:
        raise CoupledShards(f"attributes or objects that hold tensors: {expected}")


def statistics_of(values: Live, module: str) -> NormStatistics:
    """Return a module's running statistics out of a snapshot's values, on the host.

    Raises:
        CoupledShards: it does not have all three.
    """
    mean, var, count = (values.get((module, buffer)) for buffer in (MEAN, VAR, COUNT))
    if mean is None or var is None or count is None:
        raise CoupledShards(
            f"buffer {_join(module, MEAN)!r}: expected a batch norm with {VAR} and {COUNT} too, "
            f"without which its updates do not compose; {ONE_DEVICE}",
            name=_join(module, MEAN),
        )
    return NormStatistics(mean.detach().cpu(), var.detach().cpu(), int(count))


def after(start: NormStatistics, update: NormUpdate, *, module: str) -> NormStatistics:
    """Return what a range makes of the statistics `start`.

    Raises:
        CoupledShards: a shard of the range counted as a batch, and was none.
    """
    if update.left_out:
        raise CoupledShards(
            f"buffer {_join(module, MEAN)!r}: expected every shard that the batch norm counts to "
            f"change its statistics, which one without samples does not; {ONE_DEVICE}",
            name=_join(module, MEAN),
        )
    num_more = update.after.num_batches - update.before.num_batches
    return NormStatistics(
        _composed(start.mean, update.before.mean, update.after.mean, start, update),
        _composed(start.var, update.before.var, update.after.var, start, update),
        start.num_batches + num_more,
    )


def composed(
    ranges: Sequence[Mapping[str, NormUpdate]],
) -> tuple[list[dict[str, NormStatistics]], dict[str, NormStatistics]]:
    """Return the statistics that each range would have begun with in one pass, and the last ones.

    Those that no range before has changed are missing.

    Args:
        ranges: each range's updates, in order.

    Raises:
        CoupledShards: see `after`.
    """
    starts: list[dict[str, NormStatistics]] = []
    state: dict[str, NormStatistics] = {}
    for norms in ranges:
        starts.append(dict(state))
        for name, update in norms.items():
            start = state.get(name)
            state[name] = after(start, update, module=name) if start else update.after
    return starts, state


def buffers_after(gathered: Sequence[RangeOutputs]) -> dict[str, Tensor]:
    """Return all buffers after all ranges, by full name.

    Args:
        gathered: the outputs of all ranges; the first has buffers.
    """
    _, norms = composed([outputs.norms for outputs in gathered])
    return (gathered[0].buffers or {}) | {
        _join(name, buffer): value
        for name, norm in norms.items()
        for buffer, value in _tensors(norm).items()
    }


def with_statistics(snapshot: Snapshot, norms: Mapping[str, NormStatistics]) -> Snapshot:
    """Return a snapshot with other running statistics, and no attributes."""
    values = snapshot.values
    for name, norm in norms.items():
        for buffer, value in _tensors(norm).items():
            old = values[name, buffer]
            values[name, buffer] = value if old is None else value.to(old)
    return snapshot.with_values(values)


def _tensors(norm: NormStatistics) -> dict[str, Tensor]:
    return {MEAN: norm.mean, VAR: norm.var, COUNT: torch.tensor(norm.num_batches)}


def _composed(
    start: Tensor, before: Tensor, made: Tensor, state: NormStatistics, update: NormUpdate
) -> Tensor:
    num_more = update.after.num_batches - update.before.num_batches
    if num_more == 0:
        return start
    start_wide, before_wide, made_wide = start.double(), before.double(), made.double()
    if update.momentum is None:
        first, so_far = update.before.num_batches, state.num_batches
        total = (first + num_more) * made_wide + so_far * start_wide - first * before_wide
        return (total / (so_far + num_more)).to(made)
    slope = (1 - update.momentum) ** num_more
    return (made_wide + slope * (start_wide - before_wide)).to(made)


def _changed(before: Live, after: Live) -> set[Slot]:
    return {
        slot
        for slot in before.keys() | after.keys()
        if not _same(slot in before, before.get(slot), slot in after, after.get(slot))
    }


def _same(was: bool, a: Tensor | None, is_now: bool, b: Tensor | None) -> bool:
    """Return whether a buffer is what it was; NaN is NaN."""
    if was != is_now or a is None or b is None:
        return was == is_now and a is b
    if is_plain(a) and is_plain(b):
        return form(a) == form(b) and equal_numbers(a, b)
    return same_values(a, b)


def _join(module: str, buffer: str) -> str:
    return f"{module}.{buffer}" if module else buffer
