"""What the memory allows: the speed of first and later writes, in an arena and in a tensor.

`python -m benchmarks.per_sample_floor` prints GB/s of CPU time on one thread. A dense result cannot
be made faster than its bytes are written; the fill is the plainest way to write them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from gradbox_engine.per_sample import Arena

ROUNDS = 5
SAMPLES, UNITS, LAYERS = 100, 300, 14  # 504 MB, as rows of W1


def in_an_arena() -> Tensor:
    """Return one array in an arena of its own."""
    shape = (SAMPLES, LAYERS, UNITS, UNITS)
    return Arena().begin({"w": shape}, {"w": torch.float32}, torch.device("cpu"))["w"]


def in_a_tensor() -> Tensor:
    """Return an array of the same shape as torch makes it."""
    return torch.empty(SAMPLES, LAYERS, UNITS, UNITS)


def speeds(made: Callable[[], Tensor]) -> tuple[float, list[float]]:
    """Return bytes a second of a fill that is the first use of the memory, and of later ones."""
    array = made()
    first, *later = (array.nbytes / _cpu_s(lambda: array.fill_(1)) for _ in range(1 + ROUNDS))
    return first, later


def _cpu_s(call: Callable[[], object]) -> float:
    start = time.process_time_ns()
    call()
    return (time.process_time_ns() - start) / 1e9


def main() -> None:
    """Print the speeds; the first round's new pages may still have to come from the host."""
    torch.set_num_threads(1)
    for name, made in {"a tensor": in_a_tensor, "an arena": in_an_arena}.items():
        rounds = [speeds(made) for _ in range(ROUNDS)]
        firsts = ", ".join(f"{first / 1e9:.1f}" for first, _ in rounds)
        later = max(speed for _, speeds_ in rounds for speed in speeds_)
        print(f"{name}: first fill {firsts} GB/s, later {later / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
