"""The bars of the mixed-gradient benchmark, on numbers made up for it."""

from __future__ import annotations

from benchmarks.mixed.task import METHODS
from benchmarks.mixed.times import (
    DOUBLE,
    GRADBOX,
    Mixed,
    MixedPlan,
    Peak,
    mixed_section,
    mixed_verdicts,
)

MIB = 2**20
PLAN = MixedPlan(num_shards=(1, 8), depths=(4, 64), depth=16, shard=4, rounds=3, threads=1)


def measured(*, at_one: float = 1.0, at_eight: float = 0.9, growth: int = 0) -> Mixed:
    found = Mixed(PLAN, ratios={1: at_one, 8: at_eight}, errors={1: 1e-7, 8: 1e-7})
    found.seconds = {num: dict.fromkeys(METHODS, 1.0) for num in PLAN.num_shards}
    found.by_shards = {num: {GRADBOX: Peak(30 * MIB, MIB), DOUBLE: None} for num in PLAN.num_shards}
    found.by_depth = {
        4: {GRADBOX: Peak(9 * MIB, 4 * MIB), DOUBLE: Peak(20 * MIB, None)},
        64: {GRADBOX: Peak(99 * MIB, 4 * MIB + growth), DOUBLE: Peak(200 * MIB, None)},
    }
    return found


def not_met(found: Mixed) -> list[str]:
    return [line for line in mixed_verdicts(found) if line.startswith("**not met**")]


def test_bars_that_are_met_and_missed_are_told_apart() -> None:
    assert not_met(measured()) == []
    assert "at 1 shard is 1.11" in not_met(measured(at_one=1.11))[0]
    assert "at 8 shards is 1.0" in not_met(measured(at_eight=1.0))[0]
    assert "grows with depth: 1.00" in not_met(measured(growth=MIB))[0]


def test_a_process_that_died_is_in_the_table() -> None:
    assert "| 8 | 0.900 | 1.00 | 1.00 | 1e-07 | 30 | died |" in mixed_section(measured())
