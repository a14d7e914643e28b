"""Copies run beside kernels, the host waits in no loop over shards, random streams stay apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, Penalty, set_gradient
from gradbox_engine.model.calling.shard_feed import Position, ShardFeed
from tests.device import DEVICE, on_cuda_alone, same_bits

pytestmark = on_cuda_alone

SHARD_BYTES = 256 * 2**20
TRIES = 5


def seconds_on_device(run: Any) -> float:
    """Return what a call took between two events on the current stream, least of some tries."""
    least = float("inf")
    for _ in range(TRIES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        least = min(least, begin.elapsed_time(end) / 1000)
    return least


def test_the_next_shard_is_copied_while_kernels_run() -> None:
    shards = [{"x": torch.rand(SHARD_BYTES // 4).pin_memory()} for _ in range(2)]
    feed = ShardFeed([Group("z", shards)], DEVICE, widened=False)
    a = torch.rand(4096, 4096, device=DEVICE)

    def copy() -> None:
        feed.take(Position(0, 0))

    def compute() -> None:
        for _ in range(num_products):
            torch.mm(a, a)

    def both() -> None:
        compute()
        feed.prefetch(Position(0, 1))
        feed.take(Position(0, 1))

    num_products = 1
    copy(), compute()
    copying = seconds_on_device(copy)
    num_products = 1 + int(2 * copying / seconds_on_device(compute))
    computing, together = seconds_on_device(compute), seconds_on_device(both)
    assert computing > copying  # so that there is room to hide in
    assert together < computing + 0.5 * copying


class SyncsRefused:
    """Has torch raise at every wait of the host inside the loops over shards, after the first."""

    def __init__(self) -> None:
        self.num_shards = 0

    def step(self, phase: str, done: int, total: int) -> None:
        inside = phase in ("forward", "replay") and 0 < done < total
        self.num_shards += inside
        torch.cuda.set_sync_debug_mode("error" if inside else "default")


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(8 * 36, 16), nn.GELU(), nn.Linear(16, 4),
    ).to(DEVICE)  # fmt: skip


def _images(num: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [{"0": torch.randn(5, 3, 8, 8, generator=draw)} for _ in range(num)]


def _spread(z: Tensor) -> Tensor:
    return (z @ z.T).square().mean() + z.sum(0).exp().mean()


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"retain": 10**9},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"penalties": [Penalty("5", lambda tap: tap.square().mean())]},
        {"streams": "sample"},
        {"wrt": ["7.*", "inputs.0"]},
    ],
    ids=lambda terms: ", ".join(terms) or "plain",
)
def test_the_host_does_not_wait_inside_the_loops(terms: dict[str, Any]) -> None:
    model, shards = _network(), _images(6)
    job = {"groups": [Group("z", shards)], "objective": Objective(_spread), "mode": "train"}
    set_gradient(model, **job, **terms)  # libraries set themselves up
    observer = SyncsRefused()
    try:
        set_gradient(model, **job, **terms, observer=observer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert observer.num_shards == 10


def test_a_wait_inside_the_loop_would_be_seen() -> None:
    class Waits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 if x.sum().item() else 2)

    model = Waits(3, 2).to(DEVICE)
    shards = [{"0": torch.ones(2, 3)}] * 3
    try:
        with pytest.raises(Exception, match="synchroniz"):
            set_gradient(model, [Group("z", shards)], Objective(torch.sum), observer=SyncsRefused())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_two_jobs_do_not_share_their_random_numbers() -> None:
    model, groups = _network(), [Group("z", _images(4))]

    def gradient(seed: int) -> dict[str, Tensor]:
        return set_gradient(model, groups, Objective(_spread), mode="train", seed=seed).grads

    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first, other, again = gradient(1), gradient(2), gradient(1)
    assert all(same_bits(again[name], gradient) for name, gradient in first.items())
    assert not any(same_bits(other[name], gradient) for name, gradient in first.items())
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_masks_of_samples_are_the_same_on_every_device() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)).double()
    draw = torch.Generator().manual_seed(1)
    shards = [{"0": torch.randn(4, 5, generator=draw, dtype=torch.float64)} for _ in range(3)]
    job = {"mode": "train", "streams": "sample", "seed": 3}
    groups, objective = [Group("z", shards)], Objective(_spread)
    on_host = set_gradient(model, groups, objective, **job).grads
    on_device = set_gradient(model.to(DEVICE), groups, objective, **job).grads
    for name, gradient in on_host.items():
        torch.testing.assert_close(on_device[name].cpu(), gradient)
