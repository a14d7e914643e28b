"""A tensor of 8 bits and a scale, as torchao makes one: it says that it is float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Quantised(torch.Tensor):
    """`whole` · `scale`; it can be detached, moved and multiplied with, and nothing else."""

    whole: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, whole.shape, dtype=scale.dtype, device=whole.device
        )
        return made

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    @classmethod
    def of(cls, weight: Tensor) -> Quantised:
        scale = weight.abs().amax() / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def dense(self) -> Tensor:
        return self.whole.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["whole", "scale"], "symmetric"

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Quantised:
        return cls(inner["whole"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = (*args, None)[:3]
            return F.linear(x, weight.dense(), bias)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            given = (
                {} if func is torch.ops.aten.detach.default else {"device": kwargs.get("device")}
            )
            return cls(*(part.to(**given) for part in (args[0].whole, args[0].scale)))
        raise NotImplementedError(f"{func} of a quantised tensor")


class Adapted(nn.Module):
    """A quantised linear layer with an adapter of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(6, 4)
        self.base.weight = nn.Parameter(
            Quantised.of(self.base.weight.detach()), requires_grad=False
        )
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = (self.base(x) + self.up(self.down(x))).tanh()
        return z
