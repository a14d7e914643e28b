"""The benchmarks' own arithmetic: ratios, differences and bars, on numbers made up for it."""

from __future__ import annotations

import random
import statistics

import pytest
import torch

from benchmarks.measure import (
    Ratio,
    Seconds,
    bracketed,
    interleaved,
    median_of_ratios,
    median_ratio,
    relative_difference,
)
from benchmarks.replay.replay import Plan, Replay, Timing
from benchmarks.replay.replay_report import replay_section, verdicts
from benchmarks.set_loss.shard_cost import ShardCost

MIB = 2**20
PLAN = Plan(timed_pairs=64, memory_pairs=(64, 512), naive_limit=64, shard=16, rounds=3, threads=1)


def replay(*, ours: float, peak: int) -> Replay:
    found = Replay(PLAN, ShardCost(forward=1.0, backward=1.5))
    found.timings = {
        "naive": Timing(1.0, 1.0, 4.0, 0.0),
        "gradbox": Timing(ours, ours, 4.0 * ours, 1e-7),
    }
    found.memory = {
        "naive": {64: 2400 * MIB},
        "gradbox": {64: 400 * MIB, 512: peak},
    }
    found.absent = {
        "GradCache": "not measured: reason",
        "sentence-transformers": "not measured: reason",
    }
    return found


def test_the_bound_is_two_forwards_and_a_backward_to_one_of_each() -> None:
    assert ShardCost(forward=1.0, backward=1.5).bound == pytest.approx(1.4)


def test_bars_that_are_met_and_missed_are_told_apart() -> None:
    assert all(line.startswith("met") for line in verdicts(replay(ours=1.44, peak=430 * MIB)))
    slow, fat = verdicts(replay(ours=1.45, peak=441 * MIB))
    assert slow.startswith("**not met**")
    assert fat.startswith("**not met**")


def test_a_report_says_what_was_not_measured_and_why() -> None:
    text = replay_section(replay(ours=1.4, peak=400 * MIB))
    assert "| GradCache | not measured: reason |" in text
    assert "| naive | 2400 | not run |" in text


def test_a_ratio_is_the_median_of_each_rounds_ratio() -> None:
    ours = [Seconds(3.0, 1.0), Seconds(6.0, 2.0), Seconds(90.0, 90.0)]
    naive = [Seconds(2.0, 1.0), Seconds(2.0, 1.0), Seconds(90.0, 90.0)]
    assert median_ratio(ours, naive, cpu=True) == 1.0
    assert median_ratio(ours, naive, cpu=False) == 1.5
    assert median_of_ratios((2.0, 30.0, 8.0), (1.0, 10.0, 8.0)) == 2.0


def test_runs_take_turns_after_one_that_is_not_measured() -> None:
    order: list[str] = []
    seconds = interleaved({name: lambda n=name: order.append(n) for name in "ab"}, rounds=2)
    assert "".join(order) == "ab" + "ab" + "ba"
    assert {name: len(runs) for name, runs in seconds.items()} == {"a": 2, "b": 2}


def test_a_wrong_gradient_is_seen() -> None:
    right = {"w": torch.ones(4), "b": torch.ones(1)}
    assert relative_difference(right, right) == 0
    assert relative_difference({"w": right["w"] * 1.001, "b": right["b"]}, right) > 5e-4
    assert relative_difference({"w": right["w"]}, right) > 0.4


def test_a_bracketed_run_is_compared_with_the_baseline_on_both_its_sides() -> None:
    order: list[str] = []
    runs = {name: lambda n=name: order.append(n) for name in "ab"}  # type: ignore[misc]
    ratios, rounds = bracketed(runs, lambda: order.append("-"), rounds=2, seconds=0, cpu=False)
    assert "".join(order) == "ab--" + "-a-b-" + "-b-a-"
    assert ratios.keys() == {"a", "b"}
    assert rounds == 2


def test_short_steps_are_timed_in_more_rounds() -> None:
    _, rounds = bracketed({"a": lambda: None}, lambda: None, rounds=2, seconds=0.02, cpu=False)
    assert rounds > 2


def test_the_error_of_a_median_is_that_of_a_normal_distribution() -> None:
    draw = random.Random(0)
    errors, medians = [], []
    for _ in range(200):
        ratio = Ratio.of([draw.gauss(1.3, 0.02) for _ in range(51)])
        errors.append(ratio.error)
        medians.append(ratio.median)
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(medians), rel=0.15)
    assert Ratio.of([1.3]) == Ratio(1.3, 0.0)
