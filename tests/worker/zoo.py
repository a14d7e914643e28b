"""Models that test workers register as `file:function`: a plain one, and some that misbehave."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn


class Affine(nn.Module):
    """y = W x + b, 3 → 2, with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x))

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * self.forward(x)


def affine(dropout: float = 0.0) -> nn.Module:
    return Affine(dropout)


class Tied(nn.Module):
    """Two names for one weight, and a buffer that is not saved."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale


def tied(scale: float = 2.0) -> nn.Module:
    return Tied(scale)


class Heads(nn.Module):
    """What shapes the forward stands in an attribute only."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(4, 4)


def heads(heads: int) -> nn.Module:
    return Heads(heads)


def not_a_module() -> object:
    return object()


def raises() -> nn.Module:
    raise KeyError("no such checkpoint")


_draws = iter(range(1000))


def different_each_time() -> nn.Module:
    model = Affine()
    with torch.no_grad():
        model.linear.bias.fill_(next(_draws))
    return model


class Misbehaving(Affine):
    """Does what the file `order` beside this module's data says, each time it is called.

    The orders are the names of its methods; with none it behaves.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: Tensor) -> Tensor:
        order = Path(self.folder, "order")
        if order.exists():
            getattr(self, "_" + order.read_text().strip())()
        return super().forward(x)

    def _crash(self) -> None:
        ctypes.string_at(0)

    def _allocate(self) -> None:
        torch.empty(2**50)

    def _exit(self) -> None:
        sys.exit("a model has no business here")

    def _die_leaving_a_child(self) -> None:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def _sleep(self) -> None:
        time.sleep(0.05)

    def _dawdle(self) -> None:
        time.sleep(0.3)

    def _swallow(self) -> None:
        """Resist whatever can be resisted: exceptions, and every signal but SIGKILL."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            try:
                time.sleep(0.05)
            except BaseException:  # noqa: BLE001  # what a model can do and a limit must end
                continue


def misbehaving(folder: str) -> nn.Module:
    return Misbehaving(folder)
