"""Models of the tests' boxes beside those of the problem table."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn


class Slow(nn.Module):
    """A layer that takes its time, so that a job can be watched and stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.1)
        return self.layer(x)


class Tied(nn.Module):
    """One weight under two names, and a buffer that counts calls in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(torch.tanh(self.first(x))))


def slow() -> nn.Module:
    return Slow()


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()
