"""The bar of the remote step, on numbers made up for it."""

from __future__ import annotations

import pytest

from benchmarks.remote_autograd import AutogradOverhead, AutogradPlan, autograd_section

PLAN = AutogradPlan(num_pairs=48, shard=16, rounds=3, threads=1)


@pytest.mark.parametrize(
    ("local_s", "ratio", "met"), [(6.0, 1.1, True), (6.0, 1.2, False), (4.0, 1.1, False)]
)
def test_the_bar_asks_for_a_long_step_and_a_small_overhead(
    local_s: float, ratio: float, met: bool
) -> None:
    found = AutogradOverhead(
        PLAN,
        remote_s=local_s * ratio,
        local_s=local_s,
        naive_s=4.0,
        ratio=ratio,
        naive_ratio=local_s * ratio / 4,
    )
    assert ("- met:" in autograd_section(found)) == met
