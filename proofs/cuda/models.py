"""Models whose memory and faults are known beforehand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MIB = 2**20
ROWS, COLUMNS = 1024, 16_384
GRAPH_BYTES = 4 * ROWS * COLUMNS
"""What the graph of a shard of ROWS samples through `Wide` saves: the exponentials, 64 MiB."""


class _Allocates(torch.autograd.Function):
    """The identity, which needs memory of its own on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_bytes: int) -> Tensor:
        ctx.num_bytes = num_bytes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        room = torch.zeros(ctx.num_bytes, dtype=torch.uint8, device=gradient.device)
        return gradient + room[0], None


class Wide(nn.Module):
    """z_b = mean over COLUMNS of exp(x_b w): (b, 1) to (b, 1)."""

    def __init__(self, backward_bytes: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1.0, COLUMNS))
        self.backward_bytes = backward_bytes

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = (x * self.weight).exp().mean(1, keepdim=True)
        return _Allocates.apply(z, self.backward_bytes) if self.backward_bytes else z


def shards(num: int) -> list[dict[str, Tensor]]:
    """Return shards for `Wide`, on the host."""
    draw = torch.Generator().manual_seed(0)
    return [{"0": torch.rand(ROWS, 1, generator=draw)} for _ in range(num)]


class Asserting(nn.Module):
    """A linear layer, 3 → 2; an assertion fails in a kernel where x begins with a large number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("table", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        far = (x[:1, 0] > 100).long() * 10**6
        return z * self.table[far]


def asserting() -> nn.Module:
    """Return it with the same weights every time, for a models file."""
    torch.manual_seed(0)
    return Asserting()
