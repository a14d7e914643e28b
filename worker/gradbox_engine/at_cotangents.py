"""`gradient_at_cotangents`: the last phase alone, for a loss that ran elsewhere.

    dL/dθ = Σᵢ z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ,   with z̄ᵢ = ∂L/∂zᵢ given

The shards go through the model once, in order and with graphs, each under its own random stream and
the buffers that the shards before it left; that is the replay. Each z is compared with the one that
the cotangents belong to, and carried back at once.

Cost: n(F + B) at most. A shard whose cotangent is zero needs no backward pass; it needs a forward
pass only where the model has buffers, which it may advance for a later shard. Memory beyond the
model: one graph, Z, ∂L/∂Z, and one sum of gradients.

Not covered: a model without buffers that makes one when it first runs, where a zero cotangent lets
that run be left out. The comparison catches it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradbox_engine.accumulation import GradientSums
from gradbox_engine.assembly import permutation
from gradbox_engine.comparison import ReplayComparison
from gradbox_engine.errors import BadInputs
from gradbox_engine.failures import blaming
from gradbox_engine.feed import Position
from gradbox_engine.gradient import FP16_SMALLEST_SCALE, FP16_STEP, first_scale, nonzero
from gradbox_engine.input_gradients import InputGrads, collect
from gradbox_engine.job import Group, Mode, Observer, Phase, Precision, Silent
from gradbox_engine.outputs import Outputs
from gradbox_engine.phases import Prepared, Replayed
from gradbox_engine.preparation import Streams, Terms, prepared
from gradbox_engine.selection import select
from gradbox_engine.set_outputs import SetOutputs, all_positions


@dataclass(frozen=True)
class CotangentGradient:
    """Gradients, and how the replay went; the fields are those of `SetGradient`."""

    grads: dict[str, Tensor]
    unreached: tuple[str, ...]
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
    first: FirstOutputs,
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
        sums = GradientSums(selection.parameters)
        parts = _Parts(groups, first)
        backward = _Backward(ready, groups, parts, sums, observer or Silent())
        replayed = backward.run(parts.of(cotangents), precision=precision)
        grads = sums.named()
        input_grads, unreached_inputs = collect(
            groups, ready.inputs, replayed.input_grads, device=ready.device
        )
    return CotangentGradient(
        grads=grads,
        unreached=(*sums.unreached(), *unreached_inputs),
        replayed=replayed.num_replayed,
        replay_difference=replayed.difference,
        seconds={"replay": time.perf_counter() - began},
        input_grads=input_grads or None,
    )


class _Parts:
    """Where each shard lies in tensors shaped like the Z that was returned."""

    def __init__(self, groups: Sequence[Group], first: FirstOutputs) -> None:
        self._groups = groups
        self._rows: dict[Position, tuple[slice, bool]] = {}
        self._inverse: dict[str, Tensor] = {}
        for index, group in enumerate(groups):
            start = 0
            for shard, num_rows in enumerate(first.rows[group.name]):
                stop = start + (1 if num_rows is None else num_rows)
                self._rows[Position(index, shard)] = (slice(start, stop), num_rows is None)
                start = stop
            if group.order is not None:
                order_N = permutation(group.order, start, group=group.name)
                self._inverse[group.name] = order_N.argsort()
        self.first = self.of(first.outputs)

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


class _Backward:
    """One pass over the shards, in order: forward with a graph, compare, backward."""

    def __init__(
        self,
        ready: Prepared,
        groups: Sequence[Group],
        parts: _Parts,
        sums: GradientSums,
        observer: Observer,
    ) -> None:
        self._ready = ready
        self._positions = all_positions(groups)
        self._first = parts.first
        self._sums = sums
        self._observer = observer
        self._stateful = bool(ready.buffers.storages())

    def run(self, cotangents: Mapping[Position, Outputs], *, precision: Precision) -> Replayed:
        """Do it; in fp16 again with a smaller scale for as long as a gradient overflows."""
        flowing = self._flowing(cotangents)
        self._sums.scale = first_scale(flowing) if precision == "fp16" else 1.0
        while True:
            replayed = self._once(flowing, ReplayComparison(precision))
            scale_left = precision == "fp16" and self._sums.scale >= FP16_SMALLEST_SCALE
            if not scale_left or _finite(self._sums, replayed):
                return replayed
            self._sums.clear()
            self._sums.scale *= FP16_STEP

    def _once(
        self, cotangents: Mapping[Position, Outputs], comparison: ReplayComparison
    ) -> Replayed:
        buffers = self._ready.buffers
        before = buffers.first
        buffers.restore(before)
        last = max(cotangents)
        passing = [p for p in self._positions if p in cotangents or (self._stateful and p < last)]
        input_grads: dict[Position, dict[str, Tensor | None]] = {}
        with self._sums.collecting():
            for done, position in enumerate(passing):
                self._observer.step("replay", done, len(passing))
                self._sums.begin_shard()
                found = self._shard(position, cotangents.get(position), comparison)
                input_grads[position] = found
                before = buffers.advance(before)
                self._ready.feed.prefetch((*passing, None)[done + 1])
        difference = comparison.finish()
        self._observer.step("replay", len(passing), len(passing))
        return Replayed(0, len(passing), difference, input_grads)

    def _shard(
        self, position: Position, cotangent: Outputs | None, comparison: ReplayComparison
    ) -> dict[str, Tensor | None]:
        calls = self._ready.calls
        where = calls.where(position)
        passage = calls(position, self._ready.feed.take(position))
        comparison.compare(where, passage.outputs, self._first[position])
        reached = {
            name: z
            for name, z in passage.outputs.items()
            if cotangent is not None and name in cotangent and z.requires_grad
        }
        leaves = [*self._sums.parameters.values(), *passage.inputs.values()]
        if cotangent is not None and reached and leaves:
            scaled = [(cotangent[n] * self._sums.scale).to(z.dtype) for n, z in reached.items()]
            with blaming("the backward pass", where), calls.backward():
                torch.autograd.backward(list(reached.values()), scaled, inputs=leaves)
        return {
            name: None if leaf.grad is None else leaf.grad / self._sums.scale
            for name, leaf in passage.inputs.items()
        }

    def _flowing(self, cotangents: Mapping[Position, Outputs]) -> dict[Position, Outputs]:
        """Return the cotangents that are not zero, and one in each group that has only zeros.

        By that one the parameters that the loss reaches are told from those that it does not.
        """
        given = {position: part for position, part in cotangents.items() if part}
        if not given:
            raise BadInputs("cotangents: expected one for a group of the job, got none")
        chosen = nonzero(given)
        for group in {position.group for position in given}:
            members = [position for position in given if position.group == group]
            if not chosen.intersection(members):
                chosen.add(members[-1])
        return {position: part for position, part in given.items() if position in chosen}


def first_outputs(answer: SetOutputs) -> FirstOutputs:
    """Return what `set_outputs` answered in the form that `gradient_at_cotangents` takes."""
    return FirstOutputs(
        outputs={
            group: {"": z} if isinstance(z, Tensor) else z for group, z in answer.outputs.items()
        },
        rows=answer.rows,
    )


def _finite(sums: GradientSums, replayed: Replayed) -> bool:
    inputs = [g for named in replayed.input_grads.values() for g in named.values()]
    return sums.finite() and all(bool(g.isfinite().all()) for g in inputs if g is not None)
