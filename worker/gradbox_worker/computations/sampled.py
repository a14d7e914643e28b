"""A few shards of a job in the place of all: what an estimate runs.

Of each group these are the largest shard, the smallest, and the largest once more. Rows of Z that
were not computed are those of the run shard nearest in size, with 1 % of noise, so that a loss is
evaluated and differentiated at its full size, whatever it does with all rows at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, Self

import torch
from torch import Tensor

from gradbox.protocol import InputGroup, TensorRef
from gradbox_engine import Group, Observer, is_out_of_memory
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.calling.shard_feed import Position, all_positions
from gradbox_engine.ranges import (
    HeldJob,
    NormStatistics,
    OneDevice,
    Range,
    RangeCotangents,
    RangeGradient,
    RangeOutputs,
)
from gradbox_engine.ranges.one_device import done
from gradbox_engine.replay.retention import GraphBudget, graph_budget
from gradbox_engine.replay.saved_tensors import GraphSizes
from gradbox_engine.replay.z import ShardRows
from gradbox_engine.requests import Phase, Retain, Silent
from gradbox_engine.set_loss.held_passes import SetPasses
from gradbox_worker.computations.dense_rows import RowsFile
from gradbox_worker.computations.leading import Alone
from gradbox_worker.computations.memory import (
    PeakMemory,
    give_back_free_memory,
    used_bytes,
)
from gradbox_worker.files.blob_tensors import BlobTensors
from gradbox_worker.files.placed_rows import Piece

NOISE: Final = 0.01
HELD_GRAPHS: Final = 4
# A graph that seems to take more than that shares its memory with what else the process does.
MOST_IN_MEMORY: Final = 2.0


@dataclass(frozen=True)
class SampledGroup:
    """The shards of one group, and those of them that are run.

    Attributes:
        group: all of them.
        cut: those that are run, as a group of their own.
        places: where these are in the group.
        sizes: of all, the numbers in their tensors.
        rows: of all, their tensors' leading sizes.
    """

    group: Group
    cut: Group
    places: tuple[int, ...]
    sizes: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def of(cls, group: Group, inputs: InputGroup, tensors: BlobTensors) -> SampledGroup:
        """Choose the shards of a group."""
        forms = [tensors.forms(ref).values() for ref in inputs.shards]
        sizes = tuple(sum(math.prod(form.shape) for form in shard) for shard in forms)
        rows = tuple(max((f.shape[0] for f in shard if f.shape), default=1) for shard in forms)
        largest, smallest = sizes.index(max(sizes)), sizes.index(min(sizes))
        places = (largest,)
        if len(sizes) > 1:
            between = () if len(sizes) == 2 else (smallest,)
            places = (largest, *between, largest)
        streams = group.streams
        cut = replace(
            group,
            shards=tensors.shards([inputs.shards[place] for place in places]),
            order=None,
            streams=None if streams is None else [streams[place] for place in places],
        )
        return cls(group, cut, places, sizes, rows)

    def like(self, shard: int) -> int:
        """Return which of the run shards another one is most like."""
        size = self.sizes[shard]
        off = [(place != shard, abs(self.sizes[place] - size)) for place in self.places]
        return min(range(len(off)), key=lambda run: (off[run][1], off[run][0]))

    def share(self, numbers: Sequence[int]) -> float:
        """Return what all shards have of something as a multiple of what the run ones have."""
        return sum(numbers) / max(1, sum(numbers[place] for place in self.places))


class Stopwatch:
    """An observer that notes when each shard of a phase began."""

    def __init__(self, observer: Observer, devices: Sequence[torch.device]) -> None:
        self._observer = observer
        self._gpus = [device for device in devices if device.type == "cuda"]
        self._began: dict[Phase, dict[int, float]] = {}

    def step(self, phase: Phase, done: int, total: int) -> None:
        """Hear of a step."""
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)
        self._began.setdefault(phase, {}).setdefault(done, time.perf_counter())
        self._observer.step(phase, done, total)

    def seconds(self, phase: Phase) -> list[float]:
        """Return how long each shard of a phase took, in the order in which they ran."""
        times = list(self._began.get(phase, {}).values())
        return [after - before for before, after in pairwise(times)]


@dataclass(frozen=True)
class CountedGraphs:
    """What graphs take.

    Attributes:
        saved_bytes: by group what the graph of its largest shard saves, as the engine counts it.
        in_memory: how much memory that takes, relative to it: allocations leave gaps.
        forward_s: what its first pass takes where its graph is kept, in memory that is new then.
        budget: of all graphs, as the whole job has it; None where none is kept.
    """

    saved_bytes: Mapping[int, int] = field(default_factory=dict)
    in_memory: float = 1.0
    forward_s: Mapping[int, float] = field(default_factory=dict)
    budget: GraphBudget | None = None


class SampledLeading(Alone):
    """One device that runs a few shards in the place of all, see `computations.leading`.

    Attributes:
        graphs: what they take, counted in the first run; None before it.
    """

    def __init__(self, groups: Sequence[SampledGroup], retain: Retain) -> None:
        self._groups, self._retain = groups, retain
        self.graphs: CountedGraphs | None = None

    def devices(self, held: HeldJob) -> SampledDevices:
        """Return this one."""
        if self.graphs is None:
            try:
                self.graphs = counted_graphs(held, self._groups, self._retain)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self.graphs = CountedGraphs()  # then none is kept, and blocks may be recomputed
            give_back_free_memory()
            PeakMemory(*held.passes.ready.devices)  # the peak begins anew without these graphs
        return SampledDevices(held, self._groups)


def counted_graphs(held: HeldJob, groups: Sequence[SampledGroup], retain: Retain) -> CountedGraphs:
    """Put each group's largest shard through, a few times as far as the budget has room."""
    passes = held.passes
    if not isinstance(passes, SetPasses):
        return CountedGraphs()
    ready, devices = passes.ready, passes.ready.devices
    budget = graph_budget(retain, devices, sums_bytes=passes.sums().expected_bytes())
    budget.has_room()  # measures what is free, as before the first shard
    room, sizes = copy(budget), GraphSizes(ready, outlive_the_job=False)
    saved, all_bytes, alive = dict[int, int](), 0, list[object]()
    forward_s: dict[int, float] = {}
    before_bytes = used_bytes(*devices)
    for _ in range(HELD_GRAPHS):
        for index, sampled in enumerate(groups):
            more = len(sampled.sizes) > 1 and room.has_room()
            if index in saved and not (more and room.admit(saved[index])):
                continue
            ready.buffers.restore(ready.buffers.first)
            position = Position(index, 0)
            watch = Stopwatch(Silent(), devices)
            watch.step("forward", 0, 1)
            counted = sizes.counted(position, ready.feed.take(position))
            watch.step("forward", 1, 1)
            if counted is None:  # no graph of this model is kept
                return CountedGraphs()
            if index in saved:  # else the call was counted, and the first
                (taken_s,) = watch.seconds("forward")
                forward_s[index] = min(taken_s, forward_s.get(index, math.inf))
            graph, saved[index] = counted
            all_bytes += saved[index]
            alive.append(graph)
    taken_bytes = used_bytes(*devices) - before_bytes
    ready.buffers.restore(ready.buffers.first)
    in_memory = min(max(taken_bytes / max(1, all_bytes), 1.0), MOST_IN_MEMORY)
    return CountedGraphs(saved, in_memory, forward_s, budget)


class SampledDevices(OneDevice):
    """One held job of the run shards, which answers for all."""

    def __init__(self, held: HeldJob, groups: Sequence[SampledGroup]) -> None:
        super().__init__(held)
        self._groups = groups
        self._whole = [sampled.group for sampled in groups]
        self._held_groups = [sampled.cut for sampled in groups]
        self._part = Range(0, 1, 0, len(all_positions(self._held_groups)))
        self._rows: dict[str, tuple[int | None, ...]] = {}

    def forward(self, part: Range) -> Future[RangeOutputs]:
        """Run the first pass of a few shards, and make up the rows of Z of the others."""
        return done(self._forward)

    def _forward(self) -> RangeOutputs:
        found = self._job.forward(self._part)
        run = ShardRows(self._held_groups, found.rows).parts(found.outputs)
        outputs: dict[str, Outputs] = {}
        for index, sampled in enumerate(self._groups):
            name = sampled.group.name
            likes = [sampled.like(shard) for shard in range(len(sampled.sizes))]
            self._rows[name] = tuple(
                None if n is None else round(n * rows / sampled.rows[sampled.places[like]])
                for like, rows in zip(likes, sampled.rows, strict=True)
                for n in (found.rows[name][like],)
            )
            pieces = [run[Position(index, like)] for like in likes]
            own = [shard in sampled.places for shard in range(len(likes))]
            outputs[name] = {
                key: _made_up([piece[key] for piece in pieces], self._rows[name], own)
                for key in found.outputs[name]
            }
        return replace(found, outputs=outputs, rows=dict(self._rows), norms={})

    def replay(self, part: Range, cotangents: RangeCotangents) -> Future[RangeGradient]:
        """Replay the few shards at their rows of dL/dZ."""
        rows = ShardRows(self._whole, self._rows).parts(cotangents.cotangents)
        needed, asked = [], dict[str, Outputs]()
        for index, sampled in enumerate(self._groups):
            of_run = [rows[Position(index, place)] for place in sampled.places]
            asked[sampled.group.name] = {
                key: torch.cat([_with_rows(part[key]) for part in of_run]) for key in of_run[0]
            }
            needed += [Position(index, n) for n, part in enumerate(of_run) if part]
        found = self._job.replay(
            self._part,
            replace(cotangents, cotangents=asked, needed=tuple(needed), norms={}),
        )
        of_shards = {
            Position(at.group, self._groups[at.group].places[at.shard]): gradients
            for at, gradients in found.input_grads.items()
        }
        return done(lambda: replace(found, input_grads=of_shards))

    def check(self, part: Range, norms: Mapping[str, NormStatistics]) -> Future[int]:
        """Check the few shards."""
        return done(self._job.check, self._part, norms)


def _made_up(pieces: Sequence[Tensor], rows: Sequence[int | None], own: Sequence[bool]) -> Tensor:
    """Return rows of Z: those of shards that were run, and others like them."""
    numbers = [1 if n is None else n for n in rows]
    first = _with_rows(pieces[0])
    whole = first.new_empty((sum(numbers), *first.shape[1:]))
    drawn = torch.Generator(first.device).manual_seed(0)
    start = 0
    for piece, number, is_own in zip(pieces, numbers, own, strict=True):
        source = _with_rows(piece)
        if len(source) != number:
            source = source[torch.arange(number, device=source.device) % max(1, len(source))]
        if not is_own and source.is_floating_point():
            noise = torch.randn(source.shape, generator=drawn, device=source.device)
            source = source * noise.mul_(NOISE).add_(1).to(source.dtype)
        whole[start : start + number] = source
        start += number
    return whole


def _with_rows(z: Tensor) -> Tensor:
    """Return z with rows; one without dimensions is a row."""
    return z if z.dim() else z[None]


@dataclass
class CountedRows:
    """Files of dense rows that are thrown away, and how many bytes the last was to have."""

    file: RowsFile = field(init=False)
    num_bytes: int = field(default=0, init=False)

    def lay_out(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        *,
        squeezed: bool,
    ) -> None:
        """Count, and make room for the few rows."""
        self.num_bytes = sum(math.prod(shapes[n]) * dtypes[n].itemsize for n in shapes)
        self.file.lay_out(shapes, dtypes, squeezed=squeezed)

    def write(self, name: str, at: Piece, piece: Tensor) -> None:
        """Write a piece."""
        self.file.write(name, at, piece)

    def keep(self, place: object) -> None:
        """Keep nothing: an estimate has no checkpoints."""

    def go_on(self, place: object) -> bool:
        """Go on with nothing."""
        return False


class SampledTensors(BlobTensors):
    """The tensors of a job, of those with a row for each sample the rows of the run shards."""

    def __init__(self, whole: BlobTensors, taken: Mapping[TensorRef, SampledGroup]) -> None:
        """Open nothing.

        Args:
            taken: by reference whose samples a tensor has rows for, if it has as many.
        """
        super().__init__(whole.blobs, device=whole.device)
        self._taken = taken

    def __enter__(self) -> Self:
        return self

    def tensor(self, ref: TensorRef) -> Tensor:
        """Read one tensor to the device, or its rows."""
        found, sampled = super().tensor(ref), self._taken.get(ref)
        if sampled is None or found.shape[:1] != (sum(sampled.rows),):
            return found
        starts = [sum(sampled.rows[:place]) for place in sampled.places]
        return torch.cat(
            [
                found[start : start + sampled.rows[place]]
                for start, place in zip(starts, sampled.places, strict=True)
            ]
        )
