"""Peak memory and time against the batch: plain code, GradCache, and gradbox.

InfoNCE over pairs of real text through MiniLM with dropout. Every figure is of one step in a fresh
process: its peak beyond the loaded model, and its seconds, the median of rounds in which all peers
and all batches take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.measure import QUIET
from benchmarks.page import mebibytes, section, table, verdicts
from benchmarks.set_loss.memory import step_cost
from benchmarks.set_loss.peers import GRADBOX, NAIVE, Unavailable
from benchmarks.set_loss.public_peers import GRAD_CACHE
from benchmarks.set_loss.workloads import NUM_TOKENS, Workload

KEPT: Final = 8  # graphs, of the second curve of gradbox
FLATNESS: Final = 1.1
MOST_TIME: Final = 1.0  # to GradCache's

# Name in the report and the picture: the peer, and how many graphs gradbox may keep.
CURVES: Final = {
    "plain code": (NAIVE, 0),
    "GradCache": (GRAD_CACHE, 0),
    "gradbox": (GRADBOX, 0),
    f"gradbox, room for {KEPT} graphs": (GRADBOX, KEPT),
}


@dataclass(frozen=True)
class BatchPlan:
    """What to measure."""

    num_pairs: Sequence[int]
    shard: int
    rounds: int
    threads: int


@dataclass
class Batches:
    """By curve and number of pairs; a peer that cannot run has its reason in `absent`."""

    plan: BatchPlan
    peaks: dict[str, dict[int, int]] = field(default_factory=dict)
    seconds: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def ms_per_pair(self, name: str) -> dict[int, float]:
        """Return the medians of a curve's times, in milliseconds a pair."""
        return {
            num: 1e3 * statistics.median(seconds) / num
            for num, seconds in self.seconds[name].items()
        }


def measure_batches(plan: BatchPlan) -> Batches:
    """Run the benchmark; a batch that is too much for a peer has no figure."""
    found = Batches(plan)
    for name, (peer, _) in CURVES.items():
        try:
            peer.load(Workload(1, plan.shard))
        except Unavailable as reason:
            found.absent[name] = str(reason)
    curves = {name: curve for name, curve in CURVES.items() if name not in found.absent}
    for name, (peer, kept) in curves.items():
        found.peaks[name], found.seconds[name] = {}, {num: [] for num in plan.num_pairs}
        for num in plan.num_pairs:
            workload = Workload(num, plan.shard)
            cost = step_cost(peer.name, workload, threads=plan.threads, kept=kept)
            if cost is None:
                del found.seconds[name][num]
            else:
                found.peaks[name][num] = cost.peak_bytes
        print(f"{name}: peaks {found.peaks[name]}", flush=True)
    for _ in range(plan.rounds):
        for num in plan.num_pairs:
            for name, (peer, kept) in curves.items():
                if num not in found.seconds[name]:
                    continue
                workload = Workload(num, plan.shard)
                cost = step_cost(peer.name, workload, threads=plan.threads, kept=kept, env=QUIET)
                if cost is not None:
                    found.seconds[name][num].append(cost.seconds)
        print({name: found.ms_per_pair(name) for name in curves}, flush=True)
    return found


def batch_section(found: Batches) -> str:
    """Describe it."""
    plan = found.plan
    head = ["pairs", *(str(num) for num in plan.num_pairs)]
    memory, time = [], []
    for name, peaks in found.peaks.items():
        times = found.ms_per_pair(name)
        memory.append([name, *(mebibytes(peaks.get(num)) for num in plan.num_pairs)])
        time.append(
            [name, *(f"{times[num]:.1f}" if num in times else "–" for num in plan.num_pairs)]
        )
    flat = found.peaks["gradbox"]
    apart = max(flat.values()) / min(flat.values())
    bars = [(apart <= FLATNESS, f"gradbox's peak changes by at most {FLATNESS} ×: {apart:.2f}")]
    if GRAD_CACHE.name in found.seconds:
        ours, theirs = found.ms_per_pair("gradbox"), found.ms_per_pair(GRAD_CACHE.name)
        ratio = statistics.median(ours[num] / theirs[num] for num in ours.keys() & theirs.keys())
        bars.append((ratio <= MOST_TIME, f"it takes no longer than GradCache: {ratio:.2f} ×"))
    return section(
        "Batch sizes",
        f"InfoNCE over pairs of real text through all-MiniLM-L6-v2 in train mode, shards of "
        f"{plan.shard}, {NUM_TOKENS} tokens, {plan.threads} thread(s). One step in a fresh "
        f"process; times are medians of {plan.rounds} rounds.",
        "Peak memory beyond the loaded model, MiB:",
        table(head, memory),
        "Milliseconds a pair:",
        table(head, time),
        [f"- {name}: {reason}" for name, reason in found.absent.items()] + verdicts(bars),
    )
