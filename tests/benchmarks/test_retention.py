"""The retention benchmark's arithmetic, and that its peers compute what they should."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cuda.replay import EXACT, all_graphs, kernels_alone, tasks
from benchmarks.cuda.sizes import DRY
from benchmarks.measure import relative_difference
from benchmarks.replay.retention import (
    Correctness,
    Point,
    Retention,
    RetentionPlan,
    Setting,
    kept_at,
    most_within,
)
from benchmarks.replay.retention_report import bars
from benchmarks.set_loss.peers import SHARDED, gradbox, keeping, reference, sharded
from benchmarks.set_loss.public_peers import OPEN_CLIP
from benchmarks.set_loss.shard_cost import ShardCost
from benchmarks.set_loss.workloads import Workload

MIB = 2**20
SAME = 1e-5  # float32
COST = ShardCost(forward=1.0, backward=1.5)
PLAN = RetentionPlan(
    tasks=("lstm",),
    num_samples=(64, 256),
    shards=(16,),
    timed=64,
    detailed=64,
    num_tokens=16,
    rounds=1,
    seconds=0,
    threads=1,
    device="cpu",
)


def setting(**peers: Point) -> Setting:
    """Four shards, which take 1.3 of naive with nothing kept and 1.0 with everything."""
    return Setting(
        Workload(32, 16, "lstm"),
        COST,
        rounds=1,
        peers={SHARDED.name: Point(1.0, 100 * MIB), **peers},
        kept={0: Point(1.3, 40 * MIB), 1: Point(1.2, 60 * MIB), 4: Point(1.0, 100 * MIB)},
    )


def found(one: Setting, *, peak: int = 41 * MIB, updates: float | None = None) -> Retention:
    retention = Retention(PLAN, [one])
    retention.flat = {("lstm", 16): {64: 40 * MIB, 256: peak}}
    retention.correctness = {"lstm": {"gradbox": Correctness(1e-7, updates)}}
    return retention


def missed(retention: Retention) -> list[str]:
    return [line for line in bars(retention) if line.startswith("**not met**")]


def test_every_replayed_shard_costs_a_forward_and_the_last_is_never_replayed() -> None:
    one = setting()
    assert one.predicted(0) == pytest.approx(1 + 0.4 * 3 / 4)
    assert one.predicted(3) == one.predicted(4) == 1


def test_the_distance_from_the_line_is_that_of_the_worst_budget() -> None:
    one = setting()
    assert one.off_line == pytest.approx(0, abs=1e-12)
    one.kept[1] = Point(1.2 * 1.06, None)
    assert one.off_line == pytest.approx(0.06)


def test_a_peers_peak_says_how_many_graphs_fit_into_it() -> None:
    ends = {0: 40 * MIB, 4: 100 * MIB}
    assert [kept_at(peak * MIB, ends) for peak in (40, 59, 61, 99, 500)] == [0, 0, 1, 2, 4]
    assert kept_at(30 * MIB, ends) is None


def test_of_the_budgets_measured_the_largest_that_fits_is_compared() -> None:
    peaks = {0: 400, 1: 400, 2: 460, 4: 520}
    assert [most_within(peak, peaks) for peak in (400, 459, 460, 519, 900)] == [1, 1, 2, 2, 4]
    assert most_within(397, peaks) == 0  # a resident set is not the same twice
    assert most_within(390, peaks) is None
    assert most_within(None, peaks) is None


def test_all_bars_are_met_where_they_should_be() -> None:
    one = setting(other=Point(1.25, 60 * MIB))
    one.equal = {"other": 1}
    assert missed(found(one)) == []


def test_each_bar_can_be_missed() -> None:
    one = setting(other=Point(1.19, 60 * MIB), lean=Point(1.5, 10 * MIB))
    one.equal = {"other": 1, "lean": None}
    one.kept[4] = Point(1.04, 100 * MIB)
    one.kept[0] = Point(1.45, 40 * MIB)
    everything, nothing, line, equal, flat, correct = missed(found(one, peak=50 * MIB, updates=2))
    assert "1.040" in everything
    assert "1.450" in nothing
    assert "off the line" in line
    assert "other" in equal
    assert "lean" in equal
    assert "± 11.1%" in flat
    assert "gradient" in correct


@pytest.mark.parametrize("task", ["lstm", pytest.param("cnn", marks=pytest.mark.slow)])
def test_budgets_compute_the_gradient(task: str) -> None:
    workload = Workload(8, 4, task)
    in_order = reference(workload, "in order")
    by_shard = reference(workload, "by shard")
    assert relative_difference(sharded(workload)().grads, in_order) < SAME
    for kept in (0, 2):
        assert relative_difference(gradbox(workload, kept=kept)().grads, by_shard) < SAME


def test_the_loop_of_kernels_alone_computes_the_gradient() -> None:
    *_, images = tasks(DRY, torch.device("cpu"))  # no dropout: all loops agree
    assert relative_difference(kernels_alone(images), all_graphs(images)) < EXACT


def test_accumulation_without_its_random_states_is_off_and_updates_batch_norm_twice() -> None:
    lstm, cnn = Workload(8, 4, "lstm"), Workload(8, 4, "cnn")
    assert relative_difference(OPEN_CLIP.load(lstm)().grads, reference(lstm, "second pass")) > 1e-2
    assert OPEN_CLIP.load(cnn)().num_updates == 2 * cnn.num_shards
    assert keeping(1).load(cnn)().num_updates == cnn.num_shards
