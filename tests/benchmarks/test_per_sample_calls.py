"""The table of public per-sample calls: from real processes, and from made-up figures."""

from __future__ import annotations

import pytest

from benchmarks.per_sample import calls
from benchmarks.per_sample.calls import MANY, CallTimes, calls_section, measure_calls
from benchmarks.source_trees import ROOT


def test_a_row_states_the_calls_and_a_further_shard() -> None:
    ratios = {"base": 1.0, "factors": 2.0, "norms": 3.0, "dense": 4.0, MANY: 5.0}
    section = calls_section([CallTimes("W1", "this", 0.05, ratios)])
    assert "| W1 this | 50.00 | 2.00 | 3.00 | 4.00 | 1.50 |" in section


@pytest.mark.slow
def test_two_source_trees_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PROCESSES", 1)
    found = measure_calls(["W2 B=2"], against=ROOT)
    assert [one.tree for one in found] == ["before", "this"]
    assert all(one.base_s > 0 and one.ratios["dense"] > 1 for one in found)
