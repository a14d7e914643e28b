"""A few shards of a job in the place of all: what an estimate runs.

Of each group these are the largest shard, the smallest, and the largest once more. A loss that
couples all rows is evaluated and differentiated at its full size all the same: it sees the rows of
these shards over and over, as many as all have, with 1 % of noise, so that no two are equal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from gradbox.protocol import InputGroup, TensorRef
from gradbox_engine import Group, Objective, Observer
from gradbox_engine.requests import Phase, Z
from gradbox_worker.files.blob_tensors import BlobTensors

NOISE: Final = 0.01


@dataclass(frozen=True)
class SampledGroup:
    """The shards of one group, and those of them that are run.

    Attributes:
        cut: those that are run, as a group of their own.
        places: where these are in the group; the first is the largest.
        sizes: of all, the numbers in their tensors.
        rows: of all, their tensors' leading sizes.
    """

    cut: Group
    places: tuple[int, ...]
    sizes: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def of(cls, group: Group, inputs: InputGroup, tensors: BlobTensors) -> SampledGroup:
        """Choose the shards of a group."""
        forms = [tensors.forms(ref).values() for ref in inputs.shards]
        sizes = tuple(sum(form.numel() for form in shard) for shard in forms)
        rows = tuple(max((f.shape[0] for f in shard if f.shape), default=1) for shard in forms)
        largest, smallest = sizes.index(max(sizes)), sizes.index(min(sizes))
        places = ((largest,), (largest, largest), (largest, smallest, largest))[
            min(len(sizes), 3) - 1
        ]
        streams = group.streams
        cut = replace(
            group,
            shards=tensors.shards([inputs.shards[place] for place in places]),
            order=None,
            streams=None if streams is None else [streams[place] for place in places],
        )
        return cls(cut, places, sizes, rows)

    @property
    def name(self) -> str:
        """That of the group."""
        return self.cut.name

    @property
    def run_sizes(self) -> list[int]:
        """Those of the run shards."""
        return [self.sizes[place] for place in self.places]

    def share(self, numbers: Sequence[int]) -> float:
        """Return what all shards have of something as a multiple of what the run ones have."""
        return sum(numbers) / max(1, sum(numbers[place] for place in self.places))

    def num_rows(self, of_run: int) -> int:
        """Return how many rows all shards give, by those that the run ones gave.

        There is one for each sample, or one for each shard, or as many as the shards are large.
        """
        for numbers in (self.rows, [1] * len(self.sizes)):
            if of_run == sum(numbers[place] for place in self.places):
                return sum(numbers)
        return round(of_run * self.share(self.sizes))

    def taken(self, tensor: Tensor) -> Tensor:
        """Return the rows of the run shards, where a tensor has one for each sample of all."""
        if tensor.shape[:1] != (sum(self.rows),):
            return tensor
        of_shards = torch.functional.split(tensor, list(self.rows))
        return torch.cat([of_shards[place] for place in self.places])


class SampledTensors(BlobTensors):
    """The tensors of a job, of those with a row for each sample the rows of the run shards."""

    def __init__(self, whole: BlobTensors, groups: Mapping[TensorRef, SampledGroup]) -> None:
        """Open nothing.

        Args:
            groups: by reference whose samples a tensor has rows for, if it has as many.
        """
        super().__init__(whole.blobs, device=whole.device)
        self._groups = groups

    def tensor(self, ref: TensorRef) -> Tensor:
        """Read one tensor to the device, or its rows."""
        found, sampled = super().tensor(ref), self._groups.get(ref)
        return found if sampled is None else sampled.taken(found)


class FullSize:
    """Has a loss see as many rows as all shards have.

    These and their cotangent stay in memory for as long as the loss does, which is until the last
    shard is replayed: the job itself has them as long.
    """

    def __init__(self, groups: Sequence[SampledGroup]) -> None:
        self._groups = {sampled.name: sampled for sampled in groups}

    def __call__(self, objective: Objective) -> Objective:
        """Return the loss as the engine is to call it, at the rows of the run shards."""
        held: list[Tensor] = []
        first = next(iter(self._groups.values()))

        def function(*z: Z, **given: Any) -> Tensor:
            """Z comes unnamed where there is one group."""
            return objective.function(
                *(_grown(part, first, held) for part in z),
                **{
                    name: _grown(value, self._groups[name], held)
                    if not z and name in self._groups
                    else value
                    for name, value in given.items()
                },
            )

        return replace(objective, function=function)


def _grown(z: Z, sampled: SampledGroup, held: list[Tensor]) -> Z:
    """Return Z of all shards, like that of the run ones.

    Args:
        held: gets it, and its cotangent.
    """
    if not isinstance(z, Tensor):
        return {name: _grown_tensor(part, sampled, held) for name, part in z.items()}
    return _grown_tensor(z, sampled, held)


def _grown_tensor(z: Tensor, sampled: SampledGroup, held: list[Tensor]) -> Tensor:
    number = sampled.num_rows(len(z))
    if number == len(z):
        return z
    whole = z.index_select(0, torch.arange(number, device=z.device) % max(1, len(z)))
    drawn = torch.Generator(z.device).manual_seed(0)
    noise = torch.randn(whole.shape, generator=drawn, device=z.device, dtype=z.dtype)
    whole.add_(noise.mul_(NOISE).mul_(whole.detach()))
    held.append(whole.detach())
    whole.register_hook(held.append)  # type: ignore[no-untyped-call]
    return whole


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
