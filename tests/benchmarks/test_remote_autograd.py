"""The bar of the remote step, on numbers made up for it."""

from __future__ import annotations

import pytest

from benchmarks.box.remote_autograd import AutogradOverhead, AutogradPlan, autograd_section

PLAN = AutogradPlan(num_pairs=48, shard=16, rounds=3, threads=1)


@pytest.mark.parametrize(
    ("local_s", "ratio", "met"), [(6.0, 1.1, True), (6.0, 1.2, False), (4.0, 1.1, False)]
)
def test_the_bar_asks_for_a_long_step_and_a_small_overhead(
    local_s: float, ratio: float, met: bool
) -> None:
    found = AutogradOverhead(
        PLAN,
        remote_s=(local_s * ratio,) * 3,
        remote_replaying_s=(local_s * 1.4,) * 3,
        naive_s=(local_s,) * 3,
        replaying_s=(local_s * 1.3,) * 3,
        retained=18,
        replayed=0,
    )
    assert ("- met:" in autograd_section(found)) == met
