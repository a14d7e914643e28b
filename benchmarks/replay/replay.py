"""The replay benchmark: what streaming a set loss costs, in time, memory and exactness.

Time: all peers in turn, several rounds, each round's ratio to naive, medians. The bound is
(2F + B)/(F + B), F and B being one shard's forward and backward, timed in the same rounds.
Memory: peak beyond the loaded model of one step in a fresh process.
Exactness: against one graph over all shards with the peer's own dropout masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.measure import interleaved, median_ratio, relative_difference
from benchmarks.set_loss.memory import peak_bytes
from benchmarks.set_loss.peers import NAIVE, Peer, Step, Unavailable, reference
from benchmarks.set_loss.public_peers import PEERS
from benchmarks.set_loss.shard_cost import ShardClock, ShardCost
from benchmarks.set_loss.workloads import Workload

CLOCK = "one shard's forward and backward"


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    timed_pairs: int
    memory_pairs: Sequence[int]
    naive_limit: int
    shard: int
    rounds: int
    threads: int


@dataclass(frozen=True)
class Timing:
    """One peer's time as a ratio to naive, and its relative error."""

    cpu_ratio: float
    wall_ratio: float
    cpu_s: float
    error: float


@dataclass
class Replay:
    """Everything that was measured. A peer that cannot run has its reason in `absent`."""

    plan: Plan
    cost: ShardCost
    timings: dict[str, Timing] = field(default_factory=dict)
    memory: dict[str, dict[int, int | None]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def measure_replay(plan: Plan) -> Replay:
    """Run the benchmark."""
    torch.set_num_threads(plan.threads)
    workload = Workload(plan.timed_pairs, plan.shard)
    steps, absent = _load(workload)
    clock = ShardClock(workload)
    runs = interleaved({**steps, CLOCK: clock}, rounds=plan.rounds)
    found = Replay(plan, clock.cost(), absent=absent)
    for peer in _present(absent):
        to_naive = (runs[peer.name], runs[NAIVE.name])
        found.timings[peer.name] = Timing(
            cpu_ratio=median_ratio(*to_naive, cpu=True),
            wall_ratio=median_ratio(*to_naive, cpu=False),
            cpu_s=sorted(run.cpu for run in runs[peer.name])[plan.rounds // 2],
            error=_error(peer, steps[peer.name], workload),
        )
        print(f"{peer.name}: {found.timings[peer.name]}", flush=True)
    steps.clear()
    for peer in _present(absent):
        found.memory[peer.name] = _memory(peer, plan)
        print(f"{peer.name}: peak {found.memory[peer.name]}", flush=True)
    return found


def _load(workload: Workload) -> tuple[dict[str, Step], dict[str, str]]:
    steps: dict[str, Step] = {}
    absent: dict[str, str] = {}
    for peer in PEERS:
        try:
            steps[peer.name] = peer.load(workload)
        except Unavailable as reason:
            absent[peer.name] = str(reason)
    return steps, absent


def _present(absent: dict[str, str]) -> list[Peer]:
    return [peer for peer in PEERS if peer.name not in absent]


def _error(peer: Peer, step: Step, workload: Workload) -> float:
    return relative_difference(step().grads, reference(workload, peer.streams))


def _memory(peer: Peer, plan: Plan) -> dict[int, int | None]:
    limit = plan.naive_limit if peer is NAIVE else max(plan.memory_pairs)
    return {
        num_pairs: peak_bytes(peer.name, Workload(num_pairs, plan.shard), threads=plan.threads)
        for num_pairs in plan.memory_pairs
        if num_pairs <= limit
    }
