"""Per-sample gradients and Jacobians against one summed forward and backward of the same batch.

What is timed is the public call on one shard, with all that it checks, from arguments to a result
in hand that is then freed; dense rows as a job whose number does not ask for the comparison of a
row, which one of n < 64 samples asks for with probability n / 64, and as one that does: wall time
on one thread, medians over rounds in which the base and the calls take turns. gradbox's dense rows,
its other results, and each peer have processes of their own, all of them in two states of glibc's
heap: as it is, where every large array is made of new pages, and keeping what is freed. Every
process has imported what a box's device process has. The first two calls are timed before anything
else has run. All of it happens `RUNS` times, and a bar is met if it is in every run.
`per_sample_jobs` measures the same through a box.

The floor of a dense result is the base and the bytes of the result at the speed at which memory
that is in use is copied into memory that is in use.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import QUIET, in_fresh_process, timed
from benchmarks.per_sample.peers import peers, wrong_shape
from benchmarks.per_sample.workloads import (
    WORKLOADS,
    Workload,
    call,
    outputs_of,
    summed_gradient,
)
from gradbox_service.store.room import Room
from gradbox_worker.computations.factors import described
from gradbox_worker.device.importing import import_for_jobs
from gradbox_worker.files.result_file import write_result

RUNS = 3
ROUNDS_S, MOST_ROUNDS, FEWEST_ROUNDS = 2.0, 100, 3  # of one process: for so long, within these
COPIED_BYTES = 256 * 2**20
DENSE, OTHERS = "dense", "others"  # gradbox's processes; every other one is a peer's
COMPARED, EIGHT = "dense, a row compared", "dense, eight shards"
NOT_DUE = 0.9999
"""The `check_number` of a job that compares a row only where all such jobs do."""
STOCK, WARM = "stock", "warm"
HEAPS: Mapping[str, Mapping[str, str]] = {
    STOCK: {},
    WARM: {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)},
}


@dataclass
class Measured:
    """Wall seconds by method: each run's median, its first call and its second."""

    workload: str
    heap: str
    base_s: list[float] = field(default_factory=list)  # each process's, run by run
    forward_s: list[float] = field(default_factory=list)
    ratios: dict[str, list[float]] = field(default_factory=dict)  # to the base of their process
    first_s: dict[str, list[float]] = field(default_factory=dict)
    second_s: dict[str, list[float]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    dense_bytes: int = 0
    factored_bytes: int = 0
    copied_bytes_per_s: float = 0.0

    def add(self, told: Mapping[str, Any]) -> None:
        """Add what one process found."""
        seconds = dict(told["seconds"])
        base_s = seconds.pop("base")
        self.base_s.append(base_s)
        self.forward_s.append(seconds.pop("forward"))
        for method, taken_s in seconds.items():
            self.ratios.setdefault(method, []).append(taken_s / base_s)
        for method, (first_s, second_s) in told["first_calls_s"].items():
            self.first_s.setdefault(method, []).append(first_s)
            self.second_s.setdefault(method, []).append(second_s)
        self.absent.update(told["absent"])
        for name in ("dense_bytes", "factored_bytes", "copied_bytes_per_s"):
            setattr(self, name, told.get(name, getattr(self, name)))

    def ratio(self, method: str) -> float | None:
        """Return a method's time to the base's, the median of the runs."""
        found = self.ratios.get(method)
        return None if not found else statistics.median(found)

    @property
    def later_shards(self) -> list[float]:
        """What the factors of a further shard of a job take to the base, run by run."""
        one, three = (self.ratios.get(m, []) for m in ("factors", "factors, three shards"))
        return [(many - single) / 2 for single, many in zip(one, three, strict=True)]

    @property
    def of_eight(self) -> float | None:
        """What dense rows of a shard take in a job of eight, to the base."""
        whole = self.ratio(EIGHT)
        return None if whole is None else whole / 8

    @property
    def floor(self) -> float:
        """The least that a dense result can take, to the base."""
        return 1 + self.dense_bytes / self.copied_bytes_per_s / statistics.median(self.base_s)


def measure_per_sample(names: Sequence[str]) -> list[Measured]:
    """Measure each workload, every method in fresh processes for each state of the heap."""
    found = []
    for name in names:
        for heap in HEAPS:
            one = Measured(name, heap)
            for _ in range(RUNS):
                for methods in (DENSE, OTHERS, *peers()):
                    one.add(_in_a_process(name, heap, methods))
            found.append(one)
    return found


def _in_a_process(name: str, heap: str, methods: str) -> Any:
    env = {**QUIET, **HEAPS[heap], "OMP_NUM_THREADS": "1"}
    return in_fresh_process("benchmarks.per_sample.times", name, methods, env=env)


def methods_of(work: Workload, methods: str) -> dict[str, Callable[[], Any]]:
    """Return what one process times, by name."""
    found: dict[str, Callable[[], Any]]
    if methods == DENSE:
        found = {
            "dense": lambda: call(work, check_number=NOT_DUE),
            COMPARED: lambda: call(work),
        }
        if len(next(iter(work.shard.values()))) == 8:
            found[EIGHT] = lambda: call(work, shards=8, check_number=NOT_DUE)
        return found
    if methods != OTHERS:
        return {methods: peers()[methods](work)}
    found = {
        "factors": lambda: call(work, form="factored"),
        "factors, three shards": lambda: call(work, form="factored", shards=3),
        "norms": lambda: call(work, reduce="norm"),
        "gram": lambda: call(work, reduce="gram"),
        "smaller form": lambda: call(work, form="auto"),
    }
    if work.outputs > 1:
        cotangents = torch.ones_like(outputs_of(work))
        found["vjp"] = lambda: call(work, reduce="vjp", vectors=cotangents)
    return found


def measure(work: Workload, methods: str, *, rounds_s: float = ROUNDS_S) -> dict[str, Any]:
    """Time the methods in turn with the base; a method that raises says so."""
    calls = methods_of(work, methods)
    first_calls_s, absent = {}, {}
    for name, run in list(calls.items()):
        try:
            first_calls_s[name] = [timed(run).wall, timed(run).wall]
            made = run()
            wrong = wrong_shape(work, made) if isinstance(made, dict) else None
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
            absent[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
        else:
            absent |= {} if wrong is None else {name: f"the array of {wrong} has another shape"}
        if name in absent:
            first_calls_s.pop(name, None)
            del calls[name]
        made = None
    beside = {"base": lambda: summed_gradient(work), "forward": lambda: outputs_of(work)}
    seconds = _medians({**beside, **calls}, rounds_s)
    found = {"seconds": seconds, "first_calls_s": first_calls_s, "absent": absent}
    if methods == OTHERS:
        found |= _sizes(calls["smaller form"]().factors)
        found["copied_bytes_per_s"] = _copying_speed()
    return found


def _medians(calls: Mapping[str, Callable[[], Any]], rounds_s: float) -> dict[str, float]:
    taken_s: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for number in range(MOST_ROUNDS):
        if number >= FEWEST_ROUNDS and time.perf_counter() - start > rounds_s:
            break
        for name, run in calls.items():
            taken_s[name].append(timed(run).wall)
    return {name: statistics.median(found) for name, found in taken_s.items()}


def _sizes(factors: Any) -> dict[str, int]:
    tensors, metadata = described(factors)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        place = path / "r.safetensors"
        view = write_result(place, tensors, metadata=metadata, room=Room(path)).view
    return {"factored_bytes": view.size_bytes, "dense_bytes": factors.dense_bytes}


def _copying_speed() -> float:
    source, target = (torch.ones(COPIED_BYTES // 4) for _ in range(2))
    return COPIED_BYTES / min(timed(lambda: target.copy_(source)).wall for _ in range(5))


def main(arguments: Sequence[str]) -> None:
    """Measure one workload by some methods in this process, and print what was found."""
    name, methods = arguments
    torch.set_num_threads(1)
    import_for_jobs()
    print(json.dumps(measure(WORKLOADS[name](), methods)))


if __name__ == "__main__":
    main(sys.argv[1:])
