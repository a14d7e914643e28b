"""Models that show what devices do: one that takes its time, and one that can't be split."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from tests.case_models import seeded

CALL_S = 0.05


class Unhurried(nn.Module):
    """Dropout and batch norm; each call takes a while, so that faults meet its jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(CALL_S)
        return self.layers(x)


@seeded
def unhurried() -> nn.Module:
    return Unhurried()


class RunningMean(nn.Module):
    """Its output depends on a buffer that every call changes, so no shard can go first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(CALL_S)
        z = self.layer(x)
        if self.training:
            self.average.mul_(0.9).add_(0.1 * z.detach().mean(0))
        return z - self.average


@seeded
def running_mean() -> nn.Module:
    return RunningMean()


class MaskedMean(nn.Module):
    """A mean over the positions of a sample that count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(5, 3), nn.Dropout(0.3)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        counts = attention_mask[..., None]
        return (self.dropout(self.layer(x).tanh()) * counts).sum(1) / counts.sum(1)


@seeded
def masked_mean() -> nn.Module:
    return MaskedMean()


class UnhurriedMean(MaskedMean):
    """The same, of which each call takes a while."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        time.sleep(CALL_S)
        return super().forward(x, attention_mask)


@seeded
def unhurried_mean() -> nn.Module:
    return UnhurriedMean()


def weighted() -> nn.Module:
    """Wants weights of a file: its own are not the same in any two calls."""
    return nn.Linear(5, 3, dtype=torch.float64)


class Hooking(nn.Linear):
    """Registers a hook on its weight in each call, so that a gradient depends on those before."""

    def forward(self, input: Tensor) -> Tensor:
        self.weight.register_hook(lambda gradient: 2 * gradient)
        return super().forward(input)


@seeded
def hooking() -> nn.Module:
    return Hooking(5, 3)
