"""Models of the tests' boxes beside those of the problem table."""

from __future__ import annotations

import time
from collections.abc import Callable

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


class SharedNorm(nn.Module):
    """One batch norm under two names, so that its state has each tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(5)
        self.second = self.first
        self.inner = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.inner(self.first(x)).tanh())


def shared_norm() -> nn.Module:
    torch.manual_seed(0)
    return SharedNorm().double()


def without_parameters() -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Softplus())


class Pair(nn.Module):
    """Two inputs, one of them of batch 1 where all samples share it."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(2, 3)

    def forward(self, x: Tensor, *, y: Tensor) -> Tensor:
        return torch.tanh(self.left(x) * self.right(y))


def pair() -> nn.Module:
    torch.manual_seed(0)
    return Pair().double()


class Cut(nn.Module):
    """Tokens up to the longest sample's length, and their mean: a batch decides for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.layer = nn.Linear(4, 3)

    def forward(self, ids: Tensor, length: Tensor) -> Tensor:
        return self.layer(self.table(ids[:, : int(length.max())]).mean(1))


def cut() -> nn.Module:
    torch.manual_seed(0)
    return Cut().double()


class Empty(nn.Module):
    """Parameters without entries, one of them of no row and one of no column, and a 0-dim one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.no_rows = nn.Parameter(torch.zeros(0, 3))
        self.no_columns = nn.Parameter(torch.zeros(3, 0))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x)) * self.scale + self.nothing.sum()
        return h + self.no_rows.sum(0) + self.no_columns.sum(1)


def empty() -> nn.Module:
    torch.manual_seed(0)
    return Empty().double()


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(24, 3),
    ).double()


def wide() -> nn.Module:
    """A Jacobian of this takes far more memory than its model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 8))


def counter() -> Callable[[int], int]:
    """Return a function that adds to a number it closes over, which no job restores."""
    count = 0

    def add(number: int) -> int:
        nonlocal count
        count += number
        return count

    return add


class Remembering(nn.Module):
    """Keeps a count of its calls in train mode where no job restores it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.count = counter()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + self.count(int(self.training)))


def remembering() -> nn.Module:
    torch.manual_seed(0)
    return Remembering()


class Counting(nn.Module):
    """Counts its calls, in an attribute and inside one, and divides by the counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2, dtype=torch.float64)
        self.calls = 0
        self.seen = {"by": {"all": 0}}
        self.width = 5

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen["by"]["all"] += 1
        self.width = x.shape[1]
        return self.layer(x) / (self.calls * self.seen["by"]["all"])


def counting() -> nn.Module:
    torch.manual_seed(0)
    return Counting()


class OddlyNamed(nn.Module):
    """Layers whose names look like patterns, like inputs, and like parts of the loss."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("N[C]*?", "NC*x", "inputs", "loss", "loss_inputs"):
            self.add_module(name, nn.Linear(3, 3, bias=False, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x).tanh() + y
        return x


def oddly_named() -> nn.Module:
    torch.manual_seed(0)
    return OddlyNamed()


class Spectrum(nn.Module):
    """Complex outputs, of a real layer and a complex one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(3, 3)
        self.turn = nn.Parameter(torch.randn(3, 3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.before(x).to(self.turn.dtype) @ self.turn


def spectrum() -> nn.Module:
    return Spectrum(torch.complex64)


def wide_spectrum() -> nn.Module:
    return Spectrum(torch.complex128)


def large() -> nn.Module:
    """A classifier of 16 numbers, whose weights are more than come along in one body with a job."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 1024), nn.Tanh(), nn.Linear(1024, 256), nn.Linear(256, 4)
    ).double()
