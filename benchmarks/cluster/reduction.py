"""The sum of gradients of two actors against the memory's copy speed, with the actors' own code.

`python -m benchmarks.cluster.reduction` prints the seconds of both, round by round, as JSON. Each
of two actors has a sum of 400 MB in a hundred tensors; the left one adds the right one's to its
own. A copy is of as many bytes, to memory that was written to before, in one thread.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.measure import in_fresh_process, median_of_ratios
from gradbox_worker.cluster.buffers import as_buffers, as_tensors
from gradbox_worker.cluster.held_ranges import RangesInPhases
from gradbox_worker.cluster.ray_session import leave, start_here

NUM_TENSORS: Final = 100
TENSOR_NUMBERS: Final = 10**6  # of float32
NUM_BYTES: Final = NUM_TENSORS * TENSOR_NUMBERS * 4
ROUNDS: Final = 9


@dataclass(frozen=True)
class Reduction:
    """Seconds of the rounds: of a sum that crosses from one actor to the other, and of a copy."""

    sum_s: list[float]
    copy_s: list[float]

    @property
    def speed(self) -> float:
        """The sum's bytes a second."""
        return NUM_BYTES / statistics.median(self.sum_s)

    @property
    def of_copy(self) -> float:
        """The sum's speed as a part of the copy's: the median of the rounds' ratios."""
        return median_of_ratios(self.copy_s, self.sum_s)


class Holder(RangesInPhases):
    """What an actor holds of a job after its replay, without the job."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.fill()

    def fill(self) -> None:
        """Have sums again."""
        self._sums = {0: {str(n): torch.ones(TENSOR_NUMBERS) for n in range(NUM_TENSORS)}}

    def take_sums(self, index: int) -> Any:
        """Give sums away, as a device does."""
        return as_buffers(super().take_sums(index))

    def add(self, index: int, other: Any) -> int:
        """Add sums that came, as a device does."""
        return super().add(index, as_tensors(other, copy=False))


def measure_reduction() -> Reduction:
    """Measure both in a fresh process."""
    return Reduction(**in_fresh_process("benchmarks.cluster.reduction", env={}))


def main() -> int:
    """Print what was measured."""
    torch.set_num_threads(1)
    source, target = (torch.ones(NUM_BYTES // 4) for _ in range(2))
    found = Reduction([], [])
    with tempfile.TemporaryDirectory(prefix="gradbox-ray-") as folder:
        start_here(folder=Path(folder), num_cpus=2)
        import ray  # not earlier: it reads what that has set

        left, right = (ray.remote(Holder).remote() for _ in range(2))
        _summed_s(left, right)  # the store's memory is touched the first time
        for _ in range(ROUNDS):
            found.sum_s.append(_summed_s(left, right))
            found.copy_s.append(_copied_s(source, target))
        leave()
    print(json.dumps(asdict(found)))
    return 0


def _summed_s(left: Any, right: Any) -> float:
    import ray

    ray.get([left.fill.remote(), right.fill.remote()])
    begin = time.perf_counter()
    ray.get(left.add.remote(0, right.take_sums.remote(0)))
    return time.perf_counter() - begin


def _copied_s(source: torch.Tensor, target: torch.Tensor) -> float:
    begin = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
