"""`gradient_at_cotangents`: the last phase alone, for a loss that ran elsewhere.

    dL/dθ = Σᵢ z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ,   with z̄ᵢ = ∂L/∂zᵢ given

From what `set_outputs` kept, the shards' graphs go back one after the other, and those that have
none are replayed from the buffers that they began with, as in `set_gradient`. Without it all shards
go through the model once, in order and with graphs, each under its own random stream and the
buffers that the shards before it left; each z is compared with the one that the cotangents belong
to, and carried back at once. The sum is taken in the order of the shards either way, so on a CPU
the result does not depend on what was kept.

Cost, with F and B one shard's forward and backward, n shards, k of them kept: nB + (n − k)F at
most. A shard whose cotangent is zero needs no backward pass; it needs a forward pass only where
nothing was kept and the model has buffers, which it may advance for a later shard. Memory beyond
the model: one graph and those kept, Z, ∂L/∂Z, and one sum of gradients.

Not covered: a model without buffers that makes one when it first runs, where a zero cotangent lets
that run be left out. The comparison catches it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from gradbox_engine.errors import BadInputs
from gradbox_engine.model.input_gradients import InputGrads, collect
from gradbox_engine.model.outputs import Outputs
from gradbox_engine.model.prepared import Streams, Terms, prepared
from gradbox_engine.model.shard_feed import Position, all_positions
from gradbox_engine.model.wrt import select
from gradbox_engine.replay.comparison import ReplayComparison
from gradbox_engine.replay.first_pass import forward
from gradbox_engine.replay.fp16_scaling import flowing, scaled
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.kept_graphs import KeptPass
from gradbox_engine.replay.replay import Replayed, carry_back, replay
from gradbox_engine.replay.retention import GraphBudget
from gradbox_engine.replay.set_outputs import SetOutputs
from gradbox_engine.replay.shard_record import Prepared
from gradbox_engine.replay.z import permutation
from gradbox_engine.requests import Group, Mode, Observer, Phase, Precision, Silent


@dataclass(frozen=True)
class CotangentGradient:
    """Gradients, and how the replay went; the fields are those of `SetGradient`."""

    grads: dict[str, Tensor]
    unreached: tuple[str, ...]
    retained: int
    replayed: int
    replay_difference: float
    seconds: dict[Phase, float]
    input_grads: InputGrads | None


@dataclass(frozen=True)
class FirstOutputs:
    """Z of each group as `set_outputs` returned it: by group and name, and each shard's rows."""

    outputs: Mapping[str, Outputs]
    rows: Mapping[str, Sequence[int | None]]


def gradient_at_cotangents(
    model: nn.Module,
    groups: Sequence[Group],
    cotangents: Mapping[str, Outputs],
    first: FirstOutputs | KeptPass,
    *,
    seed: int = 0,
    mode: Mode = "eval",
    wrt: Sequence[str] | None = None,
    precision: Precision = "fp32",
    output: str | int | None = None,
    readout: Callable[[Any, dict[str, Any]], Any] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    streams: Streams = "shard",
    observer: Observer | None = None,
) -> CotangentGradient:
    """Return dL/dθ from ∂L/∂Z; the arguments are those of `set_gradient`, and as `set_outputs` had.

    Args:
        cotangents: by group and name, of Z's shape; one that is missing is zero.
        first: what `set_outputs` returned, or what it kept. Graphs that differentiate something
            other than `wrt` are not used. Those of shards without a cotangent stay.

    Raises:
        EngineError: see `errors`; ReplayMismatch where a shard does not repeat its first outputs.
        torch.OutOfMemoryError: one shard's graph does not fit.
    """
    terms = Terms(
        seed=seed,
        mode=mode,
        precision=precision,
        output=output,
        readout=readout,
        weights=weights or {},
        streams=streams,
    )
    selection = select(model, wrt)
    began = time.perf_counter()
    with prepared(model, groups, selection, terms) as ready:
        parts = _Parts(groups, first.rows)
        given = {p: part for p, part in parts.of(cotangents).items() if part}
        if not given:
            raise BadInputs("cotangents: expected one for a group of the job, got none")
        flows = flowing(given)
        sums = GradientSums(selection.parameters)
        way: Callable[..., Replayed]
        if isinstance(first, KeptPass):
            parameters = frozenset(selection.parameters)
            records = first.taken(given, parameters=parameters, inputs=ready.inputs)
            way = partial(replay, ready, records)
        else:
            way = partial(_in_order, ready, parts.of(first.outputs))

        def once() -> Replayed:
            comparison = ReplayComparison(precision)
            return way(flows, sums, comparison=comparison, observer=observer or Silent())

        replayed = scaled(once, flows, sums, precision)
        grads = sums.named()
        input_grads, unreached_inputs = collect(
            groups, ready.inputs, replayed.input_grads, device=ready.device
        )
    return CotangentGradient(
        grads=grads,
        unreached=(*sums.unreached(), *unreached_inputs),
        retained=replayed.num_retained,
        replayed=replayed.num_replayed,
        replay_difference=replayed.difference,
        seconds={"replay": time.perf_counter() - began},
        input_grads=input_grads or None,
    )


class _Parts:
    """Where each shard lies in tensors shaped like the Z that was returned."""

    def __init__(self, groups: Sequence[Group], rows: Mapping[str, Sequence[int | None]]) -> None:
        self._groups = groups
        self._rows: dict[Position, tuple[slice, bool]] = {}
        self._inverse: dict[str, Tensor] = {}
        for index, group in enumerate(groups):
            start = 0
            for shard, num_rows in enumerate(rows[group.name]):
                stop = start + (1 if num_rows is None else num_rows)
                self._rows[Position(index, shard)] = (slice(start, stop), num_rows is None)
                start = stop
            if group.order is not None:
                order_N = permutation(group.order, start, group=group.name)
                self._inverse[group.name] = order_N.argsort()

    def of(self, whole: Mapping[str, Outputs]) -> dict[Position, Outputs]:
        """Return each shard's part."""
        unordered = {group: self._unordered(group, named) for group, named in whole.items()}
        return {
            position: {
                name: tensor[rows].squeeze(0) if bare else tensor[rows]
                for name, tensor in unordered.get(self._groups[position.group].name, {}).items()
            }
            for position, (rows, bare) in self._rows.items()
        }

    def _unordered(self, group: str, named: Outputs) -> Outputs:
        if group not in self._inverse:
            return named
        inverse_N = self._inverse[group]
        return {name: z.index_select(0, inverse_N.to(z.device)) for name, z in named.items()}


def _in_order(
    ready: Prepared,
    first: Mapping[Position, Outputs],
    cotangents: Mapping[Position, Outputs],
    sums: GradientSums,
    *,
    comparison: ReplayComparison,
    observer: Observer,
) -> Replayed:
    """Pass over the shards once: forward with a graph, compare with the first outputs, backward."""
    stateful, last = bool(ready.buffers.storages()), max(cotangents)
    passing = [
        position
        for position in all_positions(ready.calls.groups)
        if position in cotangents or (stateful and position < last)
    ]
    input_grads: dict[Position, dict[str, Tensor | None]] = {}
    before, budget = ready.buffers.first, GraphBudget(0)
    for done, position in enumerate(passing):
        observer.step("replay", done, len(passing))
        sums.take_back()
        # Its graph is kept as that of a range's last shard, whose way back comes next.
        passed = forward(ready, [position], before=before, budget=budget, observer=Silent())
        (record,), before = passed.records, passed.after
        comparison.compare(ready.calls.where(position), record.outputs, first[position])
        if position in cotangents:
            assert record.passage is not None
            found = carry_back(ready, record, record.passage, cotangents[position], sums)
            input_grads[position] = found
        record.drop()
        ready.feed.prefetch((*passing, None)[done + 1])
    difference = comparison.finish()
    observer.step("replay", len(passing), len(passing))
    return Replayed(0, len(passing), difference, input_grads)


def first_outputs(answer: SetOutputs) -> FirstOutputs:
    """Return what `set_outputs` answered in the form that `gradient_at_cotangents` takes."""
    return FirstOutputs(
        outputs={
            group: {"": z} if isinstance(z, Tensor) else z for group, z in answer.outputs.items()
        },
        rows=answer.rows,
    )
