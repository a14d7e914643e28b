"""The mixed-gradient benchmark: time and memory against double backward.

Time: both methods in turn, several rounds, the median of each round's ratio of CPU seconds, in one
warm process, where double backward finds its memory again. Memory: one gradient in a fresh process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from subprocess import CalledProcessError

import torch

from benchmarks.measure import FRESH, in_fresh_process, interleaved, median_ratio
from benchmarks.mixed.task import ACTIVATION_BYTES, METHODS, PIXELS, Task
from benchmarks.page import MIB, mebibytes, section, table, verdict

GRADBOX, DOUBLE = METHODS

TIME_AT_ONE = 1.1
FLATNESS = 0.10


@dataclass(frozen=True)
class MixedPlan:
    """What to measure. Times and the peaks over N are taken at `depth`."""

    num_shards: Sequence[int]
    depths: Sequence[int]
    depth: int
    shard: int
    rounds: int
    threads: int


@dataclass(frozen=True)
class Peak:
    """Bytes beyond the loaded model, and those that the tangent pass adds where there is one."""

    peak_bytes: int
    tangent_bytes: int | None


@dataclass
class Mixed:
    """Everything that was measured. A process that did not live has no peak."""

    plan: MixedPlan
    ratios: dict[int, float] = field(default_factory=dict)  # by number of shards
    seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    errors: dict[int, float] = field(default_factory=dict)
    by_shards: dict[int, dict[str, Peak | None]] = field(default_factory=dict)
    by_depth: dict[int, dict[str, Peak | None]] = field(default_factory=dict)


def measure_mixed(plan: MixedPlan) -> Mixed:
    """Run the benchmark."""
    torch.set_num_threads(plan.threads)
    found = Mixed(plan)
    for num in plan.num_shards:
        task = Task(num_shards=num, shard=plan.shard, depth=plan.depth)
        runs = interleaved(
            {name: partial(run, task) for name, run in METHODS.items()},
            rounds=plan.rounds,
        )
        found.ratios[num] = median_ratio(runs[GRADBOX], runs[DOUBLE], cpu=True)
        found.seconds[num] = {
            name: sorted(run.cpu for run in taken)[plan.rounds // 2] for name, taken in runs.items()
        }
        expected = task.double_backward()
        found.errors[num] = float((task.gradbox() - expected).norm() / expected.norm())
        print(f"{num} shards: {found.ratios[num]:.3f} of double backward", flush=True)
    for num in plan.num_shards:
        found.by_shards[num] = {name: _peak(name, num, plan, plan.depth) for name in METHODS}
        print(f"{num} shards: {found.by_shards[num]}", flush=True)
    for depth in plan.depths:
        found.by_depth[depth] = {name: _peak(name, 1, plan, depth) for name in METHODS}
        print(f"depth {depth}: {found.by_depth[depth]}", flush=True)
    return found


def mixed_section(found: Mixed) -> str:
    """Describe the mixed-gradient benchmark."""
    plan = found.plan
    by_shards = ["shards", "CPU time to double backward", "gradbox, s", "double backward, s"]
    by_shards += ["relative error (fp32)", "gradbox, MiB", "double backward, MiB"]
    by_depth = ["depth, one shard", "gradbox, MiB", "of it tangent pass, MiB"]
    by_depth += ["double backward, MiB"]
    return section(
        "Mixed gradients",
        f"A gradient penalty through a frozen generator of {PIXELS} × {PIXELS} images, "
        f"{plan.depth} residual blocks, {plan.shard} samples a shard, {plan.threads} "
        f"thread(s), medians of {plan.rounds} interleaved rounds. Peaks are beyond the loaded "
        "model, in fresh processes whose allocator gives back what is freed.",
        table(by_shards, [_row_of_shards(found, num) for num in plan.num_shards]),
        table(by_depth, [_row_of_depth(found, depth) for depth in plan.depths]),
        [f"- {line}" for line in mixed_verdicts(found)],
    )


def mixed_verdicts(found: Mixed) -> list[str]:
    """Say which of the bars are met."""
    lines = []
    for num, ratio in found.ratios.items():
        if num == 1:
            lines.append(_bar(ratio <= TIME_AT_ONE, f"time at 1 shard is {ratio:.3f}", TIME_AT_ONE))
        elif num >= 8:
            lines.append(_bar(ratio < 1, f"time at {num} shards is {ratio:.3f}", 1))
    peaks = [_bytes(found.by_shards[num][GRADBOX]) for num in found.plan.num_shards]
    apart = max(peaks) / min(peaks) - 1
    lines.append(_bar(apart <= FLATNESS, f"peaks over shards differ by {apart:.1%}", FLATNESS))
    tangents = [
        peak.tangent_bytes
        for peaks in found.by_depth.values()
        if (peak := peaks[GRADBOX]) is not None and peak.tangent_bytes is not None
    ]
    if len(tangents) == len(found.plan.depths):
        grown = (max(tangents) - min(tangents)) / MIB
        layer = found.plan.shard * ACTIVATION_BYTES / MIB
        sentence = f"MiB by which the tangent pass grows with depth: {grown:.2f}"
        lines.append(_bar(grown <= layer, sentence, layer))
    return lines


def _peak(method: str, num_shards: int, plan: MixedPlan, depth: int) -> Peak | None:
    sizes = map(str, (num_shards, plan.shard, depth))
    try:
        found = in_fresh_process("benchmarks.mixed.memory", method, *sizes, env=FRESH)
    except CalledProcessError:
        return None
    return Peak(found["peak_bytes"], found.get("tangent_bytes"))


def _row_of_shards(found: Mixed, num: int) -> list[str]:
    seconds, peaks = found.seconds[num], found.by_shards[num]
    cells = [str(num), f"{found.ratios[num]:.3f}"]
    cells += [f"{seconds[name]:.2f}" for name in METHODS]
    cells += [f"{found.errors[num]:.0e}", *(_mib(peaks[name]) for name in METHODS)]
    return cells


def _row_of_depth(found: Mixed, depth: int) -> list[str]:
    ours, theirs = found.by_depth[depth][GRADBOX], found.by_depth[depth][DOUBLE]
    tangent = mebibytes(None if ours is None else ours.tangent_bytes)
    return [str(depth), _mib(ours), tangent, _mib(theirs)]


def _mib(peak: Peak | None) -> str:
    return mebibytes(None if peak is None else peak.peak_bytes)


def _bytes(peak: Peak | None) -> float:
    return float("inf") if peak is None else peak.peak_bytes


def _bar(met: bool, sentence: str, allowed: float) -> str:
    return verdict(met, f"{sentence}, allowed {allowed}")
