"""The bars of the benchmark of runs, on numbers made up for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.box.small_jobs import Costs
from benchmarks.box.training_runs import (
    ADAPTERS,
    STRUCTURE_BYTES,
    Compared,
    TrainingRuns,
    training_runs_section,
)

OBJECTS_BYTES = int(len(ADAPTERS) * STRUCTURE_BYTES)


def compared(pairs: int, run_ms: float, *, num_bytes: float = 116_000.0) -> Compared:
    run, local = (
        Costs([took], num_requests=1.0, num_commands=60.0, cpu_ms={"client": took}, num_bytes=sent)
        for took, sent in ((run_ms, num_bytes), (1000.0, 0.0))
    )
    return Compared("all", pairs, input_bytes=100_000, run=[run] * 3, local=[local] * 3)


MET = TrainingRuns(
    compared=[compared(64, 1050.0), compared(8, 1150.0)],
    tiny_ms=8.0,
    tiny_local_ms=1.0,
    tiny_bytes=2000.0,
    disk_bytes=200,
    state_bytes=100,
    beside_bytes=1000,
    switch=1.05,
    adapter_bytes=10,
    grown_bytes=40 + OBJECTS_BYTES,
)


def missed(**changed: Any) -> int:
    return training_runs_section(replace(MET, **changed)).count("**not met**")


def test_bars_that_are_just_met_are_met() -> None:
    assert missed() == 0


def test_each_number_has_a_bar() -> None:
    assert missed(compared=[compared(64, 1051.0)]) == 1
    assert missed(compared=[compared(8, 1151.0)]) == 1
    assert missed(compared=[compared(64, 1000.0, num_bytes=116_001.0)]) == 1
    assert missed(tiny_ms=8.1) == 1
    assert missed(disk_bytes=201) == 1
    assert missed(switch=1.06) == 1
    assert missed(grown_bytes=41 + OBJECTS_BYTES) == 1
