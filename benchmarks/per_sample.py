"""Per-sample gradients and Jacobians against one summed forward and backward of the same batch.

What is timed is the public call on one shard, with all that it checks. Ratios of minimum CPU time
over interleaved rounds, one thread, each workload in a process of its own, in two states of glibc's
heap: as it is, where every large array is made of fresh pages, and keeping what is freed, so that
memory is used again. `per_sample_jobs` measures the same through a box.

The floor of a dense result is the base and the bytes of the result at the speed at which memory
that is in use is copied into memory that is in use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import QUIET
from benchmarks.per_sample_peers import outputs_of, peers, wrong_shape
from benchmarks.per_sample_workloads import WORKLOADS, Workload
from gradbox_engine.per_sample import SampleResult, jacobian, per_sample_gradient
from gradbox_worker.computations.factors import described
from gradbox_worker.files.result_file import write_result

REPEATS = 3  # calls in a row, so that one method does not pay for another's cache misses
SLOW_S = 0.5  # a call that takes longer is measured in fewer rounds, one at a time
COPIED_BYTES = 256 * 2**20
STOCK, WARM = "stock", "warm"
HEAPS: Mapping[str, Mapping[str, str]] = {
    STOCK: {},
    WARM: {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)},
}


@dataclass
class Measured:
    """What one process found: least CPU seconds by method, and why a method gave none."""

    workload: str
    heap: str
    seconds: dict[str, float] = field(default_factory=dict)
    first_calls_s: list[float] = field(
        default_factory=list
    )  # wall, of the first two in the process
    absent: dict[str, str] = field(default_factory=dict)
    dense_bytes: int = 0
    factored_bytes: int = 0
    copied_bytes_per_s: float = 0.0

    def ratio(self, method: str) -> float | None:
        """Return a method's time to the base's."""
        seconds = self.seconds.get(method)
        return None if seconds is None else seconds / self.seconds["base"]

    @property
    def later_shard(self) -> float | None:
        """Return what the factors of a further shard of a job take, to the base."""
        one, three = self.ratio("factors"), self.ratio("factors, three shards")
        return None if one is None or three is None else (three - one) / 2

    @property
    def floor(self) -> float:
        """Return the least that a dense result can take, to the base."""
        return 1 + self.dense_bytes / self.copied_bytes_per_s / self.seconds["base"]


def measure_per_sample(names: list[str]) -> list[Measured]:
    """Measure each workload in a fresh process for each state of the heap."""
    return [_in_a_process(name, heap) for name in names for heap in HEAPS]


def _in_a_process(name: str, heap: str) -> Measured:
    command = [sys.executable, "-m", "benchmarks.per_sample", name, heap]
    env = {**os.environ, **QUIET, **HEAPS[heap], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def call(work: Workload, *, shards: int = 1, **how: Any) -> SampleResult:
    """Call the engine as its users do, on the batch as one shard, or on several of them."""
    inputs = [work.shard] * shards
    if work.outputs > 1:
        return jacobian(work.model, inputs, output=work.output, wrt=work.wrt, **how)
    return per_sample_gradient(
        work.model, inputs, work.loss, output=work.output, wrt=work.wrt, **how
    )


def methods(work: Workload) -> dict[str, Callable[[], Any]]:
    """Return what is timed of gradbox, by name; "base" first."""
    parameters = list(work.model.parameters())
    found: dict[str, Callable[[], Any]] = {
        "base": lambda: torch.autograd.grad(
            work.loss(outputs_of(work)).sum(), parameters, allow_unused=True
        ),
        "dense": lambda: call(work),
        "norms": lambda: call(work, reduce="norm"),
        "gram": lambda: call(work, reduce="gram"),
        "factors": lambda: call(work, form="factored"),
        "factors, three shards": lambda: call(work, form="factored", shards=3),
        "smaller form": lambda: call(work, form="auto"),
    }
    if work.outputs > 1:
        cotangents = torch.ones_like(outputs_of(work))
        found["vjp"] = lambda: call(work, reduce="vjp", vectors=cotangents)
    return found


def measure(work: Workload, heap: str) -> Measured:
    """Time all methods in turn; a method that raises says so."""
    found = Measured(work.name, heap)
    ours = methods(work)
    ours["base"]()
    for _ in range(2):
        start = time.perf_counter()
        ours["factors"]()
        found.first_calls_s.append(time.perf_counter() - start)
    calls = {**ours, **peers(work)}
    rounds = {name: _rounds(name, run, work, found) for name, run in calls.items()}
    for index in range(work.rounds):
        for name, (most, repeats) in rounds.items():
            for _ in range(repeats if index < most else 0):
                found.seconds[name] = min(found.seconds[name], _cpu_s(calls[name]))
    _sizes(found, ours["smaller form"]().factors)
    found.copied_bytes_per_s = _copying_speed()
    return found


def _rounds(name: str, run: Callable[[], Any], work: Workload, found: Measured) -> tuple[int, int]:
    """Call once unmeasured, and return how many rounds and repeats a method is worth."""
    try:
        first = run()
        once_s = _cpu_s(run)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
        found.absent[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
        return (0, 0)
    wrong = wrong_shape(work, first) if isinstance(first, dict) else None
    if wrong is not None:
        found.absent[name] = f"the array of {wrong} has another shape"
        return (0, 0)
    found.seconds[name] = once_s
    return (2, 1) if once_s > SLOW_S else (work.rounds, REPEATS)


def _cpu_s(run: Callable[[], Any]) -> float:
    start = time.process_time_ns()
    run()
    return (time.process_time_ns() - start) / 1e9


def _sizes(found: Measured, factors: Any) -> None:
    tensors, metadata = described(factors)
    with tempfile.TemporaryDirectory() as folder:
        view = write_result(Path(folder) / "r.safetensors", tensors, metadata=metadata)
    found.factored_bytes, found.dense_bytes = view.size_bytes, factors.dense_bytes


def _copying_speed() -> float:
    source, target = (torch.ones(COPIED_BYTES // 4) for _ in range(2))
    return COPIED_BYTES / min(_cpu_s(lambda: target.copy_(source)) for _ in range(5))


def main(arguments: list[str]) -> None:
    """Measure one workload in this process and print what was found."""
    name, heap = arguments
    torch.set_num_threads(1)
    print(json.dumps(vars(measure(WORKLOADS[name](), heap))))


if __name__ == "__main__":
    main(sys.argv[1:])
