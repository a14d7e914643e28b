"""Seconds by events of the device, its measured ceilings, and peaks by its allocator.

A run is timed from one event to another on the current stream, so gaps in which the device waits
for the host count. Runs take turns, the order turned round every time; figures are medians over
rounds, with half the distance between the quartiles. On a CPU the clock is the host's, and there
are no peaks.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

WARM_UPS = 2


@dataclass(frozen=True)
class Times:
    """Seconds of one run in each round."""

    rounds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.rounds)

    def ratio(self, to: Times) -> Ratio:
        """Return the median of the rounds' ratios, and how far they spread."""
        ratios = [mine / theirs for mine, theirs in zip(self.rounds, to.rounds, strict=True)]
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        return Ratio(statistics.median(ratios), (quartiles[2] - quartiles[0]) / 2)


@dataclass(frozen=True)
class Ratio:
    """A median over rounds, and half the distance between the quartiles."""

    median: float
    spread: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ± {self.spread:.3f}"


class Clock:
    """Times runs on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"

    def seconds(self, run: Callable[[], object]) -> float:
        """Run once and return what it took until the device had done its part."""
        if not self.on_cuda:
            began = time.perf_counter()
            run()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def interleaved(
        self, runs: Mapping[str, Callable[[], object]], *, rounds: int
    ) -> dict[str, Times]:
        """Run everything in turn, the first times unmeasured."""
        for run in runs.values():
            for _ in range(WARM_UPS):
                run()
        times = {name: Times() for name in runs}
        for index in range(rounds):
            for name in list(runs) if index % 2 == 0 else list(runs)[::-1]:
                times[name].rounds.append(self.seconds(runs[name]))
        return times

    def peak_bytes(self, run: Callable[[], object]) -> int | None:
        """Return the allocator's peak during one run beyond what was allocated before it."""
        if not self.on_cuda:
            return None
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def least(self, run: Callable[[], object], *, rounds: int = 5) -> float:
        """Return the least seconds of some runs."""
        for _ in range(WARM_UPS):
            run()
        return min(self.seconds(run) for _ in range(rounds))


@dataclass(frozen=True)
class Ceilings:
    """What the device was seen to do at most; random numbers, large sizes."""

    copied_bytes_per_s: float  # bytes read and bytes written
    bf16_flop_per_s: float
    upload_bytes_per_s: float  # from page-locked memory

    def __str__(self) -> str:
        return (
            f"ceilings measured: {self.copied_bytes_per_s / 1e9:.0f} GB/s copied (read + written), "
            f"{self.bf16_flop_per_s / 1e12:.1f} TFLOP/s in bf16, "
            f"{self.upload_bytes_per_s / 1e9:.1f} GB/s from page-locked memory"
        )


def measure_ceilings(clock: Clock, *, copied_bytes: int, side: int) -> Ceilings:
    """Copy between two buffers, multiply two square matrices, and upload."""
    source = torch.randint(256, (copied_bytes,), dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    copying = clock.least(lambda: target.copy_(source))
    a, b = (torch.randn(side, side, device=clock.device).bfloat16() for _ in range(2))
    multiplying = clock.least(lambda: torch.mm(a, b))
    host = torch.randint(256, (copied_bytes // 4,), dtype=torch.uint8, pin_memory=clock.on_cuda)
    uploading = clock.least(lambda: target[: len(host)].copy_(host, non_blocking=True))
    return Ceilings(2 * copied_bytes / copying, 2 * side**3 / multiplying, host.nbytes / uploading)
