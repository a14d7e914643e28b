"""Models that tests train."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def double() -> nn.Module:
    """Return layers with dropout and batch norm, in float64."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 8, bias=False),  # a bias before batch norm has no gradient, only rounding
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(8, 3),
    ).double()


def matrices() -> nn.Module:
    """Return layers of matrices alone, which every optimizer takes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 8, bias=False),
        nn.BatchNorm1d(8, affine=False),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(8, 3, bias=False),
    ).double()


def half() -> nn.Module:
    """Return layers in bfloat16."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()


class Attention(nn.Module):
    """One head over the rows of x, whose projections have names to target."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(5, 6) for _ in range(3))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).T
        out: Tensor = self.out(scores.softmax(-1) @ self.value(x))
        return out


def attention() -> nn.Module:
    torch.manual_seed(0)
    return Attention().double()


class Failing(nn.Module):
    """Fails where its input begins with a number that says how."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = float(x[0, 0])
        if order == 100.0:
            raise MemoryError("expected memory, got none")
        if order == 200.0:
            raise ValueError("no")
        out: Tensor = self.linear(x)
        return out * torch.nan if order == 300.0 else out


def failing() -> nn.Module:
    torch.manual_seed(0)
    return Failing().double()


class Growing(nn.Module):
    """Has a buffer that takes the shape of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach().clone()
        out: Tensor = self.linear(x)
        return out


def growing() -> nn.Module:
    torch.manual_seed(0)
    return Growing().double()
