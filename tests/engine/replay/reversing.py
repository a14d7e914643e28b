"""A model whose gradient alone depends on state, five shards, and what naive code makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradbox_engine import Group
from tests.device import DEVICE
from tests.engine.drawn_modules import Reversed


class Counter:
    """Counts in an attribute."""

    def __init__(self) -> None:
        self.calls = 0
        self.latest: Any = None

    def next(self) -> int:
        self.calls += 1
        return self.calls


class Reversing(nn.Module):
    """Reverses its gradient by a strength that depends on something inside `kept`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)
        self.kept: Any = self.begin()
        self.to(DEVICE, torch.float64)

    def begin(self) -> Any:
        return Counter()

    def strength(self) -> float:
        return float(self.kept.next())

    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(self.linear(x), 0.5 * self.strength()).tanh()


def groups() -> list[Group]:
    numbers = torch.Generator().manual_seed(1)
    sizes = (2, 3, 1, 2, 1)
    shards = [torch.randn(n, 5, dtype=torch.float64, generator=numbers) for n in sizes]
    return [Group("z", [{"x": shard} for shard in shards])]


def loss(z: Tensor) -> Tensor:
    return z.sum(0).square().sum()


def loss_of_some(z: Tensor) -> Tensor:
    """Of the second and the fourth of five shards alone."""
    return loss(torch.cat([z[2:5], z[6:8]]))


def naive_gradients(
    kind: type[nn.Module], of: Callable[[Tensor], Tensor] = loss
) -> dict[str, Tensor]:
    """Return the gradients with all graphs alive."""
    model = kind().train()
    named = dict(model.named_parameters())  # before some exchange theirs
    of(torch.cat([model(shard["x"].to(DEVICE)) for shard in groups()[0].shards])).backward()
    return {name: p.grad for name, p in named.items() if p.grad is not None}
