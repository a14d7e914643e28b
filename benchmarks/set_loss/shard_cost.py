"""What one shard costs: the forward and the backward that a replay repeats."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.measure import timed
from benchmarks.set_loss.pairs import TOWERS, Batch
from benchmarks.set_loss.workloads import Workload


@dataclass(frozen=True)
class ShardCost:
    """Seconds that a forward and a backward of one shard take, medians: of CPU, or on CUDA wall."""

    forward: float
    backward: float

    @property
    def bound(self) -> float:
        """Return (2F + B)/(F + B): what replaying every shard costs, to naive."""
        return (2 * self.forward + self.backward) / (self.forward + self.backward)


class ShardClock:
    """Times a forward and a backward of a few shards each time it is run."""

    def __init__(self, workload: Workload, *, num_shards: int = 4) -> None:
        self._encoder = workload.encoder()
        self._on_cpu = workload.device == "cpu"
        shards = [shard for tower in TOWERS for shard in workload.shards[tower]]
        self._shards = shards[:: max(1, len(shards) // num_shards)]
        self._forward: list[float] = []
        self._backward: list[float] = []

    def __call__(self) -> None:
        for shard in self._shards:
            outputs: list[torch.Tensor] = []
            self._forward.append(self._seconds(partial(self._run, shard, outputs)))
            cotangent = torch.ones_like(outputs[0])
            self._backward.append(self._seconds(partial(outputs[0].backward, cotangent)))
        self._encoder.zero_grad(set_to_none=True)

    def _seconds(self, run: Callable[[], object]) -> float:
        seconds = timed(run)
        return seconds.cpu if self._on_cpu else seconds.wall

    def _run(self, shard: Batch, outputs: list[torch.Tensor]) -> None:
        outputs.append(self._encoder(**shard))

    def cost(self) -> ShardCost:
        """Return the medians so far, the unmeasured first run left out."""
        warm = len(self._shards)
        return ShardCost(
            statistics.median(self._forward[warm:]), statistics.median(self._backward[warm:])
        )
