"""Cotangents on their way into a replay: which shards need one, and at which scale in float16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from gradbox_engine.model.outputs import Outputs
from gradbox_engine.model.shard_feed import Position
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.replay import Replayed
from gradbox_engine.requests import Precision

FP16_LARGEST = 2.0**8
FP16_STEP = 2.0**-6
FP16_SMALLEST_SCALE = 2.0**-24
FP16_MOST_DOUBLINGS = 120  # of float32, in which cotangents are scaled and sums divided


class Parts(Mapping[Position, Outputs]):
    """Tensors by shard, views of larger ones that are made when they are asked for."""

    def __init__(self, positions: Iterable[Position], part: Callable[[Position], Outputs]) -> None:
        self._positions = dict.fromkeys(positions)
        self._part = part

    def __getitem__(self, position: Position) -> Outputs:
        if position not in self._positions:
            raise KeyError(position)
        return self._part(position)

    def __contains__(self, position: object) -> bool:
        return position in self._positions

    def __iter__(self) -> Iterator[Position]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)


def flowing(parts: Mapping[Position, Outputs]) -> Parts:
    """Return the cotangents that are not zero, and one in each group that has only zeros.

    A shard whose cotangent is zero needs no backward pass. By the one in each group the parameters
    that the loss reaches are told from those that it does not. Waits for the device once.
    """
    given = {position: part for position, part in parts.items() if part}
    chosen = _nonzero(given)
    for group in {position.group for position in given}:
        members = [position for position in given if position.group == group]
        if not chosen.intersection(members):
            chosen.add(members[-1])
    return Parts([position for position in given if position in chosen], parts.__getitem__)


def scaled(
    replay: Callable[[], Replayed],
    cotangents: Mapping[Position, Outputs],
    sums: GradientSums,
    precision: Precision,
) -> Replayed:
    """Replay; in fp16 again with a smaller scale for as long as a gradient overflows."""
    if precision != "fp16":
        sums.scale = 1.0
        return replay()
    sums.scale = _first_scale(cotangents)
    while True:
        replayed = replay()
        if sums.scale < FP16_SMALLEST_SCALE or _finite(sums, replayed):
            return replayed
        sums.clear()
        sums.scale *= FP16_STEP


def _nonzero(parts: Mapping[Position, Outputs]) -> set[Position]:
    if not parts:
        return set()
    flags = [(position, c.any()) for position, part in parts.items() for c in part.values()]
    flows = torch.stack([flag for _, flag in flags]).tolist()
    return {position for (position, _), flag in zip(flags, flows, strict=True) if flag}


def _first_scale(cotangents: Mapping[Position, Outputs]) -> float:
    """Return the power of two that lifts the largest cotangent to about FP16_LARGEST."""
    largest = [c.abs().amax() for part in cotangents.values() for c in part.values() if c.numel()]
    top = float(torch.stack(largest).amax()) if largest else 0.0
    if not 0 < top < torch.inf:
        return 1.0
    return 2.0 ** min(round(math.log2(FP16_LARGEST / top)), FP16_MOST_DOUBLINGS)


def _finite(sums: GradientSums, replayed: Replayed) -> bool:
    inputs = [g for named in replayed.input_grads.values() for g in named.values()]
    return sums.finite() and all(bool(g.isfinite().all()) for g in inputs if g is not None)
