"""Peak memory of one mixed gradient: `python -m benchmarks.mixed.memory METHOD SHARDS SHARD DEPTH`.

A process of its own for each figure. Prints the peak beyond the loaded model and, for gradbox, what
the tangent pass adds to what is there when it begins: freed memory is handed back to the system
before, so that what the first pass needed does not hide what this one needs.
"""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.measure import return_memory
from benchmarks.mixed.task import Task
from gradbox_worker.computations.memory import PeakMemory


class TangentPass:
    """Measures memory anew when the tangent pass begins."""

    def __init__(self) -> None:
        self.memory = PeakMemory(torch.device("cpu"))
        self.before_bytes = self.memory.measure()[1]
        self.earlier_bytes = 0

    def step(self, phase: str, done: int, total: int) -> None:
        """Begin anew before the first shard of the last phase."""
        if (phase, done) == ("replay", 0):
            self.earlier_bytes = self.memory.measure()[0]
            return_memory()
            self.memory = PeakMemory(torch.device("cpu"))


def main(arguments: list[str]) -> int:
    """Print the bytes as JSON."""
    method, num_shards, shard, depth = arguments
    torch.set_num_threads(1)
    task = Task(num_shards=int(num_shards), shard=int(shard), depth=int(depth))
    # Loads code and kernels, which are not what is measured.
    Task(num_shards=1, shard=1, depth=1).gradbox()
    Task(num_shards=1, shard=1, depth=1).double_backward()
    observer = TangentPass()
    if method == "gradbox":
        task.gradbox(observer)
    else:
        task.double_backward()
    last_bytes, at_last_bytes = observer.memory.measure()
    found = {"peak_bytes": max(last_bytes, observer.earlier_bytes) - observer.before_bytes}
    if method == "gradbox":
        found["tangent_bytes"] = last_bytes - at_last_bytes
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
