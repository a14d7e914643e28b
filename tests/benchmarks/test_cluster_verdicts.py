"""The cluster benchmark's bars, on numbers made up for them."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cluster.reduction import Reduction
from benchmarks.cluster.speed_up import ClusterPlan, ClusterTimes, Timing, cluster_section

MIB = 2**20
JOB = Timing(
    one_s=[20.0],
    two_s=[8.0],
    retained=(1, 2),
    bytes_moved={"outputs": MIB, "cotangents": MIB, "sums": 80 * MIB, "inputs": 50 * MIB},
    result_bytes=80 * MIB,
    ceilings=[1.9],
)
MET = ClusterTimes(
    ClusterPlan(num_pairs=64, shard=8, rounds=1),
    without_graphs=JOB,
    with_graphs=JOB,
    first_rows=JOB,
    rows=JOB,
    trivial_s=0.039,
    plain_s=0.030,
    reduction=Reduction(sum_s=[0.1, 0.1, 9.0], copy_s=[0.06, 0.06, 0.06]),
)


def missed(found: ClusterTimes) -> list[str]:
    return [line for line in cluster_section(found).splitlines() if "**not met**" in line]


def test_bars_that_are_met_are_told() -> None:
    assert not missed(MET)


def test_a_sum_that_travels_twice_misses_the_bar() -> None:
    moved = {**JOB.bytes_moved, "sums": 160 * MIB}
    (line,) = missed(replace(MET, without_graphs=replace(JOB, bytes_moved=moved)))
    assert "1.1 × the least" in line


def test_a_slow_reduction_misses_the_bar() -> None:
    (line,) = missed(replace(MET, reduction=Reduction(sum_s=[0.2], copy_s=[0.06])))
    assert "copy in memory" in line


def test_a_ceiling_stands_beside_its_speed_up() -> None:
    assert "| no graphs kept | 20.0 | 8.0 | 2.50 | 1.90 | 1 and 2 |" in cluster_section(MET)


def test_a_job_far_below_what_the_machine_allows_misses_the_bar() -> None:
    (line,) = missed(replace(MET, without_graphs=replace(JOB, ceilings=[2.8])))
    assert "0.92 of what two processes" in line
