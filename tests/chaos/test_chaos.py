"""The box under faults, for minutes: never in the default suite."""

from __future__ import annotations

import pytest

from proofs.chaos.report import misses, text
from proofs.chaos.run import Plan, run


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_box_holds_while_its_parts_are_killed_one_by_one() -> None:
    outcome = run(Plan(minutes=0.6, seed=1, whole_box=False, full_disk=False))
    assert not misses(outcome), text(outcome)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_box_holds_under_every_fault_for_five_minutes() -> None:
    outcome = run(Plan(minutes=5.0, seed=2))
    assert not misses(outcome), text(outcome)
