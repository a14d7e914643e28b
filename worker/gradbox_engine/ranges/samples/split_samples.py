"""`split_samples`: one per-sample job over ranges of its shards, wherever these run.

    each shape:     its plan, on one device                                   SampleDevice.plans
    each range r:   the rows of its samples, or what they are reduced to      SampleDevice.run
    here:           rows and numbers of samples joined in order; sums (`clipped_sum`, `vjp`) added
                    in the tree of `reduction`
    a Gram:         each range's factors stay where they are; J_r J_sᵀ for r ≤ s, each once, and
                    its transpose

With other shards to multiply with, theirs run first, in ranges of their own; their factors come
here, and go to every range as `against`. The result depends on the ranges alone, and with one range
it is that of `per_sample_gradient` or `jacobian`.

Cost: theirs divided among the devices; with `form="auto"` the rows of one shard more, which tell
the form for all ranges.

Shapes: B samples over all ranges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradbox_engine.errors import BadInputs, DeviceLost
from gradbox_engine.per_sample.job import check_cotangents
from gradbox_engine.per_sample.planned_model import Plans
from gradbox_engine.per_sample.planning.model import Shapes
from gradbox_engine.per_sample.reductions import check_names
from gradbox_engine.per_sample.request import (
    Form,
    Request,
    SampleResult,
    most_compared,
)
from gradbox_engine.per_sample.sample_loss import check_given_apart, rows_by_sample
from gradbox_engine.ranges.coroutines import Coroutine, LostDevices, on_some_device, run_together
from gradbox_engine.ranges.protocol import NamedSums, Range
from gradbox_engine.ranges.reduction import added, split_in_tree
from gradbox_engine.ranges.samples.protocol import (
    RangeSamples,
    Rows,
    SampleDevice,
    SampleDevices,
    SampleTask,
)
from gradbox_engine.ranges.samples.sample_ranges import SampleRanges
from gradbox_engine.requests import Observer, Recomputed, Silent
from gradbox_factors import Factored

T = TypeVar("T")

GRAMS = ("gram", "gram_trace")
SUMMED = ("clipped_sum", "vjp")
"""Reductions that sum over samples; all others have something for each."""


@dataclass(frozen=True)
class SampleRun:
    """How one range went."""

    start: int
    stop: int
    samples: int
    seconds: float
    devices_lost: int


@dataclass(frozen=True, kw_only=True)
class SplitSamples(SampleResult):
    """What `per_sample_gradient` and `jacobian` return, and the ranges it was computed in."""

    ranges: tuple[SampleRun, ...]


def split_samples(
    own: SampleRanges,
    devices: SampleDevices,
    parts: Sequence[Range],
    request: Request,
    *,
    loss_inputs: Mapping[str, Any] | None = None,
    other_parts: Sequence[Range] = (),
    other_loss_inputs: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> SplitSamples:
    """Compute what the request asks of all samples.

    Args:
        own: the job as the leader has it.
        devices: each has `SampleRanges` of the same job.
        parts: ranges that cover all shards in order.
        request: checked; its `against` may be rows of an earlier call, but not shards.
        loss_inputs: as in `per_sample_gradient`; None for a Jacobian.
        other_parts: ranges of other shards, where rows are to be multiplied with theirs.
        other_loss_inputs: what the loss reads for them, in place of its own of the same names.
        observer: told of the samples of ranges that have ended, and about once a second.

    Raises:
        BadReduction: `vectors` does not fit the samples.
        DeviceLost: no device is left, or one range has lost too many.
        EngineError: see `per_sample_gradient`.
    """
    job = _SplitSamples(own, devices, parts, request, loss_inputs, observer or Silent())
    if other_parts:
        job.run_others(other_parts, other_loss_inputs or {})
    return job.run()


class _SplitSamples:
    """One job on its way."""

    def __init__(
        self,
        own: SampleRanges,
        devices: SampleDevices,
        parts: Sequence[Range],
        request: Request,
        loss_inputs: Mapping[str, Any] | None,
        observer: Observer,
    ) -> None:
        self._own, self._devices, self._parts, self._request = own, devices, parts, request
        self._loss_inputs, self._has_loss = loss_inputs or {}, loss_inputs is not None
        self._observer, self._start = observer, time.perf_counter()
        self._lost = LostDevices()
        self._plans, self._samples = self._planned(parts, of_others=False)
        self._against = request.against if isinstance(request.against, Factored) else None
        self._other_values: Tensor | None = None

    def run_others(self, parts: Sequence[Range], given: Mapping[str, Any]) -> None:
        """Make the rows of the other shards, and gather them here as factors."""
        plans, samples = self._planned(parts, of_others=True)
        check_given_apart(self._loss_inputs, given, (sum(self._samples), sum(samples)))
        basis = SampleTask("none", "smaller", 0, sum(samples), plans=plans, of_others=True)
        tasks = _with_rows(basis, samples, {**self._loss_inputs, **given})
        found = self._run(parts, tasks, samples)
        others = joined(parts, [f.result for f in found], reduce="none", seconds=0.0)
        self._against, self._other_values = others.factors, others.values

    def run(self) -> SplitSamples:
        """Run the job's own ranges, and join what they give."""
        request, num_samples = self._request, sum(self._samples)
        own_gram = request.reduce in GRAMS and self._against is None
        pulled_back = request.reduce == "vjp"
        if pulled_back:
            check_cotangents(request.vectors, num_samples)
        basis = SampleTask(
            reduce="none" if own_gram else request.reduce,
            form="factored" if own_gram else request.form,
            first_sample=0,
            num_samples=num_samples,
            vectors=request.vectors,
            plans=self._plans,
            against=None if pulled_back else self._against,
            keep_rows=own_gram,
        )
        tasks = _with_rows(basis, self._samples, self._loss_inputs)
        if request.form == "auto":
            form: Form = "smaller" if self._factors_are_smaller(tasks[0]) else "dense"
            tasks = [replace(task, form=form) for task in tasks]
        found = self._run(self._parts, tasks, self._samples)
        results = [f.result for f in found]
        whole = joined(self._parts, results, reduce=request.reduce, seconds=0.0)
        if own_gram:
            grams = GramOfRanges(self._devices, self._parts, tasks, found, self._lost)
            gram = grams.whole(trace=request.reduce == "gram_trace")
            whole = replace(whole, arrays={"gram": gram[:, 0, :, 0] if self._has_loss else gram})
        elif pulled_back and self._against is not None:
            check_names(whole.names, self._against)
            whole = replace(whole, arrays={"jvp": self._against.jvp(whole.arrays)})
        seconds = time.perf_counter() - self._start
        facts = {**vars(whole), "other_values": self._other_values, "seconds": seconds}
        return SplitSamples(**facts, ranges=self._runs(results))

    def _planned(self, parts: Sequence[Range], *, of_others: bool) -> tuple[Plans, list[int]]:
        """Have each shape planned by one device; return how many samples each range has, too."""
        shards = share_out(parts, [self._own.shapes(part, of_others=of_others) for part in parts])
        found = self._on_devices(
            parts, lambda d, part: d.plans(part, shards[part.index], of_others=of_others)
        )
        plans = {shapes: plan for plans in found for shapes, plan in plans.items()}
        return plans, self._own.count(parts, plans, of_others=of_others)

    def _run(
        self, parts: Sequence[Range], tasks: Sequence[SampleTask], samples: Sequence[int]
    ) -> list[RangeSamples]:
        def tick(ended: list[int]) -> None:
            self._observer.step("samples", sum(samples[n] for n in ended), sum(samples))

        return self._on_devices(parts, lambda d, part: d.run(part, tasks[part.index]), tick=tick)

    def _factors_are_smaller(self, task: SampleTask) -> bool:
        first = self._parts[:1]
        (smaller,) = self._on_devices(first, lambda d, part: d.smaller(part, task))
        return smaller

    def _on_devices(
        self,
        parts: Sequence[Range],
        call: Callable[[SampleDevice, Range], Future[T]],
        *,
        tick: Callable[[list[int]], None] = lambda _ended: None,
    ) -> list[T]:
        take, lost = self._devices.take, self._lost
        return run_together([on_some_device(p, take, call, lost) for p in parts], tick=tick)

    def _runs(self, results: Sequence[SampleResult]) -> tuple[SampleRun, ...]:
        return tuple(
            SampleRun(part.start, part.stop, result.samples, result.seconds, self._lost.of(part))
            for part, result in zip(self._parts, results, strict=True)
        )


def share_out(parts: Sequence[Range], shapes: Sequence[Sequence[Shapes]]) -> list[list[int]]:
    """Return which shards each range's device plans: the first of every shape, in turn.

    They need not be the range's own: one range may have most of the shapes.

    Args:
        shapes: of each range's shards.
    """
    first: dict[Shapes, int] = {}
    for part, of_range in zip(parts, shapes, strict=True):
        for shard, one in enumerate(of_range, part.start):
            first.setdefault(one, shard)
    shards = list(first.values())
    return [shards[index :: len(parts)] for index in range(len(parts))]


def _with_rows(
    task: SampleTask, samples: Sequence[int], loss_inputs: Mapping[str, Any]
) -> list[SampleTask]:
    """Return the task of each range, with its own rows of what has one a sample."""
    by_sample = frozenset(rows_by_sample(loss_inputs, task.num_samples))
    tasks = []
    for number, first in zip(samples, accumulate(samples, initial=0), strict=False):
        rows = slice(first, first + number)
        given = {n: v[rows] if n in by_sample else v for n, v in loss_inputs.items()}
        vectors = task.vectors[rows] if task.reduce == "vjp" else task.vectors
        tasks.append(
            replace(
                task,
                first_sample=first,
                loss_inputs=given,
                by_sample=by_sample,
                vectors=vectors,
            )
        )
    return tasks


def joined(
    parts: Sequence[Range], results: Sequence[SampleResult], *, reduce: str, seconds: float
) -> SampleResult:
    """Return what the job over all ranges gives.

    Raises:
        BadInputs: ranges differ in their number of outputs.
    """
    first = results[0]
    for part, result in zip(parts, results, strict=True):
        if result.outputs != first.outputs:
            raise BadInputs(
                f"shard {part.start}: expected {first.outputs} outputs a sample like shard 0, got "
                f"{result.outputs}: pad the shards alike, or pool in readout="
            )
    if len(results) == 1:
        return first
    arrays = [result.arrays for result in results]
    loops = {name: why for result in results for name, why in result.loops.items()}
    return SampleResult(
        recomputed=Recomputed.joined(result.recomputed for result in results),
        arrays=tree_sum(arrays) if reduce in SUMMED else _cat(arrays),
        factors=joined_factors([result.factors for result in results]),
        parameter_norms=_cat([result.parameter_norms for result in results]),
        values=torch.cat([r.values for r in results if r.values is not None]),
        roads={
            name: ("loop",) if name in loops else _all_roads(name, results)
            for name in dict.fromkeys(name for result in results for name in result.roads)
        },
        loops=loops,
        unreached=tuple(n for n in first.unreached if all(n in r.unreached for r in results)),
        names=first.names,
        samples=sum(result.samples for result in results),
        outputs=first.outputs,
        rows_compared=most_compared(result.rows_compared for result in results),
        seconds=seconds,
    )


def joined_factors(factors: Sequence[Factored | None]) -> Factored | None:
    """Return the factors of all ranges, in order."""
    pieces = [piece for found in factors if found is not None for piece in found.pieces]
    return Factored(pieces) if pieces else None


def tree_sum(sums: Sequence[NamedSums]) -> NamedSums:
    """Return the sum over ranges, see `reduction`."""
    if len(sums) == 1:
        return sums[0]
    left, right = split_in_tree(sums)
    return added(tree_sum(left), tree_sum(right))


def _cat(named: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([tensors[name] for tensors in named]) for name in named[0]}


def _all_roads(name: str, results: Sequence[SampleResult]) -> tuple[str, ...]:
    return tuple(sorted({road for result in results for road in result.roads.get(name, ())}))


class GramOfRanges:
    """J Jᵀ of all samples, out of blocks J_r J_sᵀ of ranges r ≤ s, each computed once.

        ranges    0    1    2
            0     ■    ■    ■
            1     ᵀ    ■    ■        ᵀ: the transpose of the block on the other side
            2     ᵀ    ᵀ    ■

    Factors stay on the devices that made them; a block moves those of one range to another's
    device. Rows that are lost with a device are made again.
    """

    def __init__(
        self,
        devices: SampleDevices,
        parts: Sequence[Range],
        tasks: Sequence[SampleTask],
        found: Sequence[RangeSamples],
        lost: LostDevices,
    ) -> None:
        """Take what ranges have made.

        Args:
            tasks: by which the rows of `found` were made.
        """
        self._devices, self._parts, self._tasks = devices, parts, tasks
        self._rows: list[Rows | None] = [samples.rows for samples in found]
        self._lost = lost

    def whole(self, *, trace: bool) -> Tensor:
        """Return J Jᵀ, (B, Y, B, Y), or its trace over outputs, (B, B).

        Raises:
            DeviceLost: no device is left, or one range has lost too many.
        """
        number = len(self._parts)
        missing = [(r, s) for r in range(number) for s in range(r, number)]
        blocks: dict[tuple[int, int], Tensor] = {}
        while missing:
            found = run_together([self._block(r, s, trace=trace) for r, s in missing])
            pairs = list(zip(missing, found, strict=True))
            blocks |= {pair: block for pair, block in pairs if isinstance(block, Tensor)}
            missing = [pair for pair, block in pairs if not isinstance(block, Tensor)]
            errors = [block for _, block in pairs if isinstance(block, DeviceLost)]
            if errors:
                self._make_again(missing, blocks, errors[0])
        for r, s in [(r, s) for r, s in blocks if r != s]:
            blocks[s, r] = blocks[r, s].permute((1, 0) if trace else (2, 3, 0, 1))
        over = 1 if trace else 2
        return torch.cat(
            [torch.cat([blocks[r, s] for s in range(number)], over) for r in range(number)]
        )

    def _block(self, r: int, s: int, *, trace: bool) -> Coroutine[Tensor | DeviceLost]:
        """Compute one block; return the error where rows are lost."""
        right = None if r == s else self._rows[s]
        try:
            block: Tensor = yield self._devices.gram(self._rows[r], right, trace=trace)
        except DeviceLost as error:
            return error
        return block

    def _make_again(
        self,
        missing: Sequence[tuple[int, int]],
        done: Container[tuple[int, int]],
        error: DeviceLost,
    ) -> None:
        """Compute lost rows again; where it cannot be told whose are lost, all that may be."""
        concerned = sorted({number for pair in missing for number in pair})
        lost = [number for number in concerned if (number, number) not in done] or concerned
        parts = [self._parts[number] for number in lost]
        for part in parts:
            self._lost.count(part, error)

        def call(device: SampleDevice, part: Range) -> Future[RangeSamples]:
            return device.run(part, self._tasks[part.index])

        found = run_together(
            [on_some_device(part, self._devices.take, call, self._lost) for part in parts]
        )
        for number, samples in zip(lost, found, strict=True):
            self._rows[number] = samples.rows
