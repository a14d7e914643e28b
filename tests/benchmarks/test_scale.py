"""The simulation of many devices: its limits, which are known without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cluster.scale import Assumed, Network, ShardCosts, below, curve, job_seconds

COSTS = ShardCosts(
    forward_s=0.1,
    replay_s=0.3,
    backward_s=0.2,
    loss_s=0.0,
    spread=0.0,
    input_bytes=0,
    output_bytes=0,
    sum_bytes=0,
)
IDEAL = Assumed(faster=1.0, devices_apart=0.0, call_s=0.0, graphs_kept=0)
SLOW = Network("slow", inside=1e6, between=1e6, latency_s=0.0)


def test_devices_that_nothing_holds_up_take_their_share() -> None:
    points = curve(COSTS, SLOW, IDEAL, 1024)
    assert [point.efficiency for point in points] == pytest.approx([1.0] * len(points))
    assert below(points) is None


def test_graphs_that_many_devices_keep_make_them_more_than_their_number() -> None:
    points = curve(COSTS, SLOW, replace(IDEAL, graphs_kept=128), 1024, devices=(1, 8))
    assert points[0].efficiency == 1
    assert points[1].efficiency == pytest.approx((128 * 0.3 + 896 * 0.4) / (8 * 128 * 0.3))


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ({"loss_s": 0.01}, "loss"),
        ({"output_bytes": 10_000}, "Z and dL/dZ"),
        ({"input_bytes": 200_000}, "inputs"),
        ({"sum_bytes": 10**7}, "sums"),
    ],
)
def test_what_does_not_divide_is_what_gives_first(changed: dict[str, float], first: str) -> None:
    low = below(curve(replace(COSTS, **changed), SLOW, IDEAL, 1024))
    assert low is not None
    assert low.first == first


def test_a_sum_moves_once_a_level() -> None:
    costs = replace(COSTS, sum_bytes=10**6)
    seconds = job_seconds(costs, SLOW, replace(IDEAL, add_bytes_per_s=1e30), 1024, 16)
    assert seconds["sums"] == pytest.approx(4)
