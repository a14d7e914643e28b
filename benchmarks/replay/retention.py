"""The retention benchmark: set-loss gradients over memory budgets, against every peer.

For each task, number of samples and shard size: first the peers' peak memory, one step each in a
fresh process, and gradbox's with nothing (the median of three processes) and with everything kept.
Kept graphs add to the peak in proportion, so that says how many gradbox may keep at each peer's
peak. Then time: all of them in turn, several rounds and more where steps are short, each between
two runs of the naive sharded step and as a ratio to their mean, medians; CPU seconds on a CPU, wall
seconds on CUDA. One shard's forward F and backward B are timed in the same rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.measure import Ratio, bracketed, relative_difference, reuse_memory
from benchmarks.set_loss.memory import peak_bytes
from benchmarks.set_loss.peers import GRADBOX, SHARDED, Peer, Step, Unavailable, keeping, reference
from benchmarks.set_loss.public_peers import OTHERS
from benchmarks.set_loss.shard_cost import ShardClock, ShardCost
from benchmarks.set_loss.workloads import Workload

CLOCK = "one shard's forward and backward"
ENDS = (0.0, 1.0)
REPEATABLE = 0.01  # a resident set is the same again within this
FLAT_REPEATS = 3
QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class RetentionPlan:
    """What to measure.

    `rounds` and `seconds` of the naive step are the least. Time is taken up to `timed` samples,
    gradbox's memory with nothing kept at every size. At `detailed` samples five budgets are
    measured, elsewhere the two ends.
    """

    tasks: Sequence[str]
    num_samples: Sequence[int]
    shards: Sequence[int]
    timed: int
    detailed: int
    num_tokens: int
    rounds: int
    seconds: float
    threads: int
    device: str

    def workload(self, task: str, num_samples: int, shard: int) -> Workload:
        """Return the workload of so many samples, half of them in each tower."""
        return Workload(num_samples // 2, shard, task, self.num_tokens, self.device)


@dataclass(frozen=True)
class Point:
    """One peer's step: time to the naive sharded step, and peak memory beyond the model.

    `error` is the time's standard error.
    """

    time: float
    peak_bytes: int | None
    error: float = 0.0


@dataclass
class Setting:
    """One task at one size. `equal` says how many graphs gradbox keeps at a peer's peak memory.

    It is None for a peer that needs less memory than gradbox with nothing kept.
    """

    workload: Workload
    cost: ShardCost
    rounds: int
    peers: dict[str, Point] = field(default_factory=dict)
    kept: dict[int, Point] = field(default_factory=dict)
    equal: dict[str, int | None] = field(default_factory=dict)

    def replayed(self, kept: int) -> int:
        """Return how many shards are replayed: the last one's graph needs no room in a budget."""
        return max(0, self.workload.num_shards - 1 - kept)

    def predicted(self, kept: int) -> float:
        """Return 1 + F/(F + B) for the part of the shards that is replayed."""
        return 1 + (self.cost.bound - 1) * self.replayed(kept) / self.workload.num_shards

    @property
    def off_line(self) -> float:
        """Return the largest relative distance from the line between the two ends."""
        nothing, everything = self.kept[min(self.kept)].time, self.kept[max(self.kept)].time
        slope = (nothing - everything) / max(self.replayed(min(self.kept)), 1)
        return max(
            abs(point.time / (everything + slope * self.replayed(kept)) - 1)
            for kept, point in self.kept.items()
        )


@dataclass(frozen=True)
class Correctness:
    """Against one graph with the peer's own masks, and batch-norm updates for each shard."""

    error: float
    updates_per_shard: float | None


@dataclass
class Retention:
    """Everything that was measured."""

    plan: RetentionPlan
    settings: list[Setting] = field(default_factory=list)
    flat: dict[tuple[str, int], dict[int, int | None]] = field(default_factory=dict)
    correctness: dict[str, dict[str, Correctness]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def measure_retention(plan: RetentionPlan) -> Retention:
    """Run the benchmark."""
    torch.set_num_threads(plan.threads)
    reuse_memory()
    found = Retention(plan)
    for task in plan.tasks:
        small = plan.workload(task, min(plan.num_samples), max(plan.shards))
        found.correctness[task] = _correctness(small, found.absent)
        for shard in plan.shards:
            for num_samples in plan.num_samples:
                workload = plan.workload(task, num_samples, shard)
                if num_samples <= plan.timed:
                    fractions = QUARTERS if num_samples == plan.detailed else ENDS
                    setting = _measure(workload, fractions, plan)
                    found.settings.append(setting)
                    nothing = setting.kept[0].peak_bytes
                else:
                    nothing = _peak(GRADBOX, workload, plan)
                found.flat.setdefault((task, shard), {})[num_samples] = nothing
                print(f"{task}, shard {shard}, {num_samples} samples: measured", flush=True)
    return found


def _correctness(workload: Workload, absent: dict[str, str]) -> dict[str, Correctness]:
    found: dict[str, Correctness] = {}
    for peer in (SHARDED, GRADBOX, *OTHERS):
        try:
            outcome = peer.load(workload)()
        except Unavailable as reason:
            absent[f"{peer.name}, {workload.task}"] = str(reason)
            continue
        updates = outcome.num_updates
        found[peer.name] = Correctness(
            relative_difference(outcome.grads, reference(workload, peer.streams)),
            None if updates is None else updates / workload.num_shards,
        )
    return found


def _measure(workload: Workload, fractions: Sequence[float], plan: RetentionPlan) -> Setting:
    peers = _available(workload)
    ours = {round(part * workload.num_shards) for part in fractions}
    ends = {kept: _peak(GRADBOX, workload, plan, kept=kept) for kept in (0, workload.num_shards)}
    peaks = {peer.name: _peak(peer, workload, plan) for peer in peers}
    estimates = (kept_at(peak, ends) for name, peak in peaks.items() if name != SHARDED.name)
    near = {kept for kept in estimates if kept is not None}
    # One more than the estimate may fit as well: the first graph takes less than those after it.
    budgets = sorted({*ours, *near, *(min(kept + 1, workload.num_shards) for kept in near)})
    budget_peaks = {
        kept: ends[kept] if kept in ends else _peak(GRADBOX, workload, plan, kept=kept)
        for kept in budgets
    }
    equal = {
        name: most_within(peak, budget_peaks)
        for name, peak in peaks.items()
        if name != SHARDED.name
    }
    times, cost, rounds = _times(workload, [*peers, *map(keeping, budgets)], plan)
    setting = Setting(workload, cost, rounds, equal=equal)
    for peer in peers:
        time = times[peer.name]
        setting.peers[peer.name] = Point(time.median, peaks[peer.name], time.error)
    for kept in budgets:
        time = times[keeping(kept).name]
        setting.kept[kept] = Point(time.median, budget_peaks[kept], time.error)
    return setting


def kept_at(peak: int | None, ends: Mapping[int, int | None]) -> int | None:
    """Return how many graphs may be kept within a peak; None if not even none.

    Args:
        peak: in bytes.
        ends: gradbox's peaks in bytes with no graphs kept and with all.
    """
    num_shards = max(ends)
    least, most = ends[0], ends[num_shards]
    if peak is None or least is None or most is None or peak < least * (1 - REPEATABLE):
        return None
    a_graph = (most - least) / (num_shards - 1)  # the last shard's is kept in any case
    return max(0, min(num_shards, int((peak - least) / a_graph)))


def most_within(peak: int | None, peaks: Mapping[int, int | None]) -> int | None:
    """Return how many graphs may be kept within a peak, by the peaks measured; None if not none.

    Args:
        peak: in bytes.
        peaks: gradbox's in bytes, by how many graphs it may keep; the least is that of 0.
    """
    if peak is None:
        return None
    fitting = [kept for kept, own in peaks.items() if own is not None and own <= peak]
    nothing = peaks[0]
    if not fitting and nothing is not None and nothing * (1 - REPEATABLE) <= peak:
        return 0
    return max(fitting, default=None)


def _times(
    workload: Workload, peers: Sequence[Peer], plan: RetentionPlan
) -> tuple[dict[str, Ratio], ShardCost, int]:
    clock = ShardClock(workload)
    steps: dict[str, Step] = {peer.name: peer.load(workload) for peer in peers}
    naive = steps.pop(SHARDED.name)
    on_cpu = workload.device == "cpu"
    times, rounds = bracketed(
        {**steps, CLOCK: clock}, naive, rounds=plan.rounds, seconds=plan.seconds, cpu=on_cpu
    )
    return {SHARDED.name: Ratio(1.0, 0.0), **times}, clock.cost(), rounds


def _available(workload: Workload) -> list[Peer]:
    found = []
    for peer in (SHARDED, *OTHERS):
        try:
            peer.load(workload)
        except Unavailable:
            continue
        found.append(peer)
    return found


def _peak(peer: Peer, workload: Workload, plan: RetentionPlan, *, kept: int = 0) -> int | None:
    """Return the peak in bytes: the median of three where it has to be flat, None if it died."""
    repeats = FLAT_REPEATS if peer is GRADBOX and kept == 0 else 1
    peaks = [
        peak_bytes(peer.name, workload, threads=plan.threads, kept=kept) for _ in range(repeats)
    ]
    known = [peak for peak in peaks if peak is not None]
    return None if len(known) < repeats else statistics.median_low(known)
