"""Time by interleaved runs, memory by fresh processes."""

from __future__ import annotations

import ctypes
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
NORMAL_DEVIATIONS = 1.4826  # standard deviations to a normal distribution's median deviation


@dataclass(frozen=True)
class Seconds:
    """What one run took, on the clock and of all CPUs together."""

    wall: float
    cpu: float


Runs = dict[str, list[Seconds]]


def reuse_memory() -> None:
    """Have this process keep the memory that is freed, where its C library is glibc.

    Otherwise large arrays are made of fresh pages every time, which cost more than much of the
    arithmetic; whose turn it is to pay for them is chance. CUDA's allocator keeps memory, too.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_MAX, 0)
        library.mallopt(M_TRIM_THRESHOLD, -1)


def return_memory() -> None:
    """Have this process give back the pages that it does not use, where its C library is glibc.

    Small tensors would be made in what an earlier step has left, and count for nothing.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def timed(run: Callable[[], object]) -> Seconds:
    """Run once and say what it took, until the device has done its part."""
    _finish()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    _finish()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def median_ms(run: Callable[[], object], times: int) -> float:
    """Run so often, one after the other, and return the median in milliseconds on the clock."""
    return 1e3 * statistics.median(timed(run).wall for _ in range(times))


def interleaved(runs: Mapping[str, Callable[[], object]], *, rounds: int) -> Runs:
    """Run everything once unmeasured, then all in turn for so many rounds.

    The order is turned round every time, so that nothing always follows the same neighbour.
    """
    for run in runs.values():
        run()
    seconds: Runs = {name: [] for name in runs}
    for index in range(rounds):
        names = list(runs) if index % 2 == 0 else list(runs)[::-1]
        for name in names:
            seconds[name].append(timed(runs[name]))
    return seconds


def median_of_ratios(times_s: Iterable[float], others_s: Iterable[float]) -> float:
    """Return the median over rounds of each round's ratio."""
    return statistics.median(a / b for a, b in zip(times_s, others_s, strict=True))


def median_ratio(runs: list[Seconds], to: list[Seconds], *, cpu: bool) -> float:
    """Return the median over rounds of each round's ratio, of CPU or of wall time."""
    if cpu:
        return median_of_ratios((run.cpu for run in runs), (run.cpu for run in to))
    return median_of_ratios((run.wall for run in runs), (run.wall for run in to))


def _finish() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Ratio:
    """A median over rounds, and its standard error as the spread of the rounds lets it expect."""

    median: float
    error: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Ratio:
        """Take the rounds' ratios; the error is that of a normal distribution's median."""
        median = statistics.median(rounds)
        deviation = NORMAL_DEVIATIONS * statistics.median(abs(r - median) for r in rounds)
        return cls(median, math.sqrt(math.pi / 2 / len(rounds)) * deviation)


def bracketed(
    runs: Mapping[str, Callable[[], object]],
    baseline: Callable[[], object],
    *,
    rounds: int,
    seconds: float,
    cpu: bool,
) -> tuple[dict[str, Ratio], int]:
    """Return each run's seconds to the baseline's, which is timed before and after every run.

    So what other programs do to a machine is done to both. Medians over rounds; the order is
    turned round every time, and a first round is not measured.

    Args:
        rounds: how many at the least.
        seconds: of the baseline's runs, over as many rounds as that takes: those of short runs
            spread more.

    Returns:
        The ratios, and how many rounds there were.
    """
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    baseline()
    rounds = max(rounds, math.ceil(seconds / timed(baseline).wall))
    for index in range(rounds):
        before = timed(baseline)
        for name in list(runs) if index % 2 == 0 else list(runs)[::-1]:
            here, after = timed(runs[name]), timed(baseline)
            if cpu:
                ratios[name].append(2 * here.cpu / (before.cpu + after.cpu))
            else:
                ratios[name].append(2 * here.wall / (before.wall + after.wall))
            before = after
    return {name: Ratio.of(found) for name, found in ratios.items()}, rounds


def relative_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Return ‖left − right‖ / ‖right‖ in float64, over all parameters that either has."""
    zero = torch.zeros(())
    apart = sum(
        float((left.get(name, zero).double() - right.get(name, zero).double()).square().sum())
        for name in left.keys() | right.keys()
    )
    size = sum(float(tensor.double().square().sum()) for tensor in right.values())
    return float((apart / size) ** 0.5)


QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
MAPPED = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    "MKL_DISABLE_FAST_MM": "1",
}
"""glibc gives every tensor of 64 KiB or more pages of its own, and returns them when it is freed;
MKL keeps no buffer of the largest product so far. So the resident set is what is alive, and not
also what the heap has not given back."""

FRESH = {**QUIET, **MAPPED}


def in_fresh_process(module: str, *arguments: str, env: Mapping[str, str]) -> Any:
    """Run a module of the benchmarks, and return what it printed last, one line of JSON.

    Args:
        env: variables of its environment, beside those of this process.

    Raises:
        subprocess.CalledProcessError: it failed, or was killed for what it took.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **env},
    )
    return json.loads(done.stdout.splitlines()[-1])
