"""What a device shared equally would have done, on days that can be worked out by hand."""

from __future__ import annotations

import random

import pytest

from benchmarks.box.day import PersonsDay, persons_days
from benchmarks.box.day_jobs import read_mix
from benchmarks.box.fair_share import Ran, fair_waits


def ran(person: str, submitted_s: float, device_s: float, *, started_s: float = 0.0) -> Ran:
    return Ran(person, submitted_s, started_s, started_s + device_s)


def test_one_person_waits_for_the_jobs_before() -> None:
    assert fair_waits([ran("ann", 0, 2), ran("ann", 1, 3)]) == pytest.approx([2, 4])


def test_two_people_have_half_of_the_device_each() -> None:
    assert fair_waits([ran("ann", 0, 2), ran("bob", 0, 1)]) == pytest.approx([3, 2])


def test_many_jobs_of_one_do_not_make_another_wait_longer() -> None:
    sweep = [ran("ann", 0, 1) for _ in range(50)]
    assert fair_waits([*sweep, ran("bob", 10, 1)])[-1] == pytest.approx(2)


def test_who_comes_later_shares_from_then_on() -> None:
    # Ann has 1 s alone, then half: 3 s are left, of which bob's 1 s takes 2 s to be done.
    assert fair_waits([ran("ann", 0, 4), ran("bob", 1, 1)]) == pytest.approx([5, 2])


def test_an_idle_device_waits_for_the_next_job() -> None:
    assert fair_waits([ran("ann", 0, 1), ran("bob", 100, 1)]) == pytest.approx([1, 1])


def test_all_that_is_submitted_is_served_by_the_end_of_a_busy_period() -> None:
    draw, now_s = random.Random(0), 1.8e9
    jobs = [
        ran(draw.choice("abcd"), now_s + draw.uniform(0, 5), draw.uniform(0.5, 2))
        for _ in range(40)
    ]
    waits = fair_waits(jobs)
    ends = [job.submitted_s + wait for job, wait in zip(jobs, waits, strict=True)]
    first = min(job.submitted_s for job in jobs)
    assert max(ends) == pytest.approx(first + sum(job.device_s for job in jobs))
    assert all(wait >= job.device_s - 1e-6 for job, wait in zip(jobs, waits, strict=True))


def test_a_persons_day_compares_all_waits_with_the_fair_ones() -> None:
    jobs = [ran("ann", 0, 2, started_s=0), ran("bob", 0, 1, started_s=2)]
    found = {day.person: day for day in persons_days(jobs)}
    assert found["bob"] == PersonsDay("bob", num_jobs=1, device_s=1, waited_s=3, fair_s=2)
    assert found["bob"].ratio == pytest.approx(1.5)
    assert found["ann"].ratio == pytest.approx(2 / 3)


def test_the_mix_has_ten_people_whose_jobs_can_be_made() -> None:
    mix = read_mix()
    assert len({row.person for row in mix}) == len(mix) == 10
    for row in mix:
        assert row.job(0).model == row.model
