"""The bars of the benchmark of small jobs, on numbers made up for it."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.box.small_jobs import Costs, SmallJobs, small_jobs_section

FAST = Costs([8.0] * 100, num_requests=2.0, num_commands=30.0, cpu_ms={"client": 1.0})
MET = SmallJobs(FAST, FAST, FAST, local_step_ms=1.0, rate_one=150.0, rate_many=150.0, load=0.1)


def missed(found: SmallJobs) -> int:
    return small_jobs_section(found).count("**not met**")


def test_bars_that_are_just_met_are_met() -> None:
    assert missed(MET) == 0


def test_each_number_has_a_bar() -> None:
    slow = replace(FAST, times_ms=[8.0] * 90 + [30.0] * 10)
    assert missed(replace(MET, run=slow)) == 1
    assert missed(replace(MET, run=replace(FAST, times_ms=[11.0] * 100))) == 1
    assert missed(replace(MET, run=replace(FAST, num_commands=31.0))) == 1
    assert missed(replace(MET, submit=replace(FAST, num_requests=3.0))) == 1
    assert missed(replace(MET, steps=replace(FAST, num_requests=5.0))) == 1
    assert missed(replace(MET, steps=replace(FAST, times_ms=[22.0] * 100))) == 1
    assert missed(replace(MET, rate_one=149.0)) == 1
    assert missed(replace(MET, rate_many=149.0)) == 1
