"""The models of attacked boxes: a plain one, and some that do what no model should."""

from __future__ import annotations

import ctypes
import os
import time

import torch
from torch import Tensor, nn

ORDERS = ("interrupt", "fork", "print", "crash")
"""What `Hostile` does, by the number in its input; 0 has it behave."""


class Plain(nn.Module):
    """(B, 3) → (B, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Slow(Plain):
    """Takes 0.2 s a call."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.2)
        return super().forward(x)


class Hostile(Plain):
    """Obeys the first number of its input."""

    def forward(self, x: Tensor) -> Tensor:
        order = int(x.flatten()[0])
        if order:
            getattr(self, f"_{ORDERS[order - 1]}")()
        return super().forward(x)

    def _interrupt(self) -> None:
        raise KeyboardInterrupt

    def _fork(self) -> None:
        """Leave a process behind that has left the session."""
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
            os._exit(0)
        time.sleep(30)

    def _print(self) -> None:
        """Print 1 GB."""
        line = b"x" * 2**20 + b"\n"
        for _ in range(1024):
            os.write(1, line)

    def _crash(self) -> None:
        ctypes.string_at(0)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Plain()


def slow() -> nn.Module:
    torch.manual_seed(0)
    return Slow()


def hostile() -> nn.Module:
    torch.manual_seed(0)
    return Hostile()


def words() -> nn.Module:
    """Embeds (B, T) words; a factored row of its gradient holds their ids."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(12, 2)).double()


def wide() -> nn.Module:
    """16 million parameters: 16 rows of its gradient take a gigabyte."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 2))
