"""Losses that hold torch's own modules: how they are made and called.

Each takes Z of shape (N, D) and returns a tensor of any shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

N, D = 6, 8
LABELS = torch.tensor([0, 3, 1, 7, 5, 2])
TARGETS = torch.linspace(0.1, 0.9, N * D, dtype=torch.float64).reshape(N, D)
SIGNS = (torch.arange(N * D) % 2 * 2 - 1).reshape(N, D).double()
DIMS = {1: (2, 4), 2: (2, 2, 2), 3: (1, 2, 2, 2)}
Make = Callable[[], nn.Module]


class Calling(nn.Module):
    """A module, called as the function says."""

    def __init__(self, module: nn.Module, call: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, z: Tensor) -> Any:
        return self.call(self.module, z)


class Attention(nn.Module):
    """Z attends to itself, as one sequence without a batch dimension or as a batch of one."""

    def __init__(self, *, batched: bool = True, mask: Tensor | None = None, **given: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, **given)
        self.batched = batched
        self.mask = mask

    def forward(self, z: Tensor) -> Tensor:
        z = z[None] if self.batched else z
        output, weights = self.attention(z, z, z, key_padding_mask=self.mask)
        return output.sum(0) + weights.square().sum()


class Twice(nn.Module):
    """One projector on two views of Z, as Barlow Twins has it: its statistics move twice."""

    def __init__(self) -> None:
        super().__init__()
        self.projector = nn.Sequential(
            nn.Linear(D, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, 3)
        )
        self.last = nn.BatchNorm1d(3, affine=False)

    def forward(self, z: Tensor) -> Tensor:
        left, right = (self.last(self.projector(view)) for view in (z, z.flip(1)))
        return left.T @ right / z.shape[0]


class Recurrence(nn.Module):
    """Z as sequences of two steps."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, z: Tensor) -> Tensor:
        output, _ = self.layer(z.unflatten(1, (2, 4)))
        return output


class Fused(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        q = z.unflatten(1, (2, 4)).transpose(0, 1)
        return F.scaled_dot_product_attention(q, q, q.flip(-1), is_causal=True)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def of_shape(*shape: int, module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, shape), module)


def on_grids(
    name: str, *given: Any, dims: tuple[int, ...] = (1, 2, 3), **more: Any
) -> dict[str, Make]:
    """The modules `name`1d, 2d and 3d, on Z as sequences, images and volumes."""

    def make(d: int) -> Make:
        return lambda: of_shape(*DIMS[d], module=getattr(nn, f"{name}{d}d")(*given, **more))

    return {f"{name}{d}d": make(d) for d in dims}


def of_channels(name: str, *given: Any, **more: Any) -> dict[str, Make]:
    """Those that are told the number of channels."""

    def make(d: int) -> Make:
        kind, channels = getattr(nn, f"{name}{d}d"), DIMS[d][0]
        return lambda: of_shape(*DIMS[d], module=kind(channels, *given, **more))

    return {f"{name}{d}d": make(d) for d in DIMS}


def plain(names: str, *given: Any, **more: Any) -> dict[str, Make]:
    return {name: lambda name=name: getattr(nn, name)(*given, **more) for name in names.split()}  # type: ignore[misc]


def called(name: str, call: Callable[[Any, Tensor], Any], *given: Any, **more: Any) -> Make:
    return lambda: Calling(getattr(nn, name)(*given, **more), call)


def against(names: str, target: Tensor) -> dict[str, Make]:
    return {name: called(name, lambda module, z: module(z, target)) for name in names.split()}


def unpooled(d: int, **more: Any) -> Make:
    def call(module: Any, z: Tensor) -> Tensor:
        pool = getattr(nn, f"MaxPool{d}d")(2, return_indices=True)
        values, indices = pool(z.unflatten(1, DIMS[d]))
        return module(values, indices, **more)

    return called(f"MaxUnpool{d}d", call, 2)


def transformer(name: str, **more: Any) -> nn.Module:
    layer: nn.Module = getattr(nn, f"Transformer{name}Layer")(D, 2, 16, dropout=0.0, **more)
    return layer


def parametrized() -> nn.Module:
    layer = nn.Linear(D, D)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer
