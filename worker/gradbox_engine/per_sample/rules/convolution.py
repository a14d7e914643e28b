"""Convolutions: the input and the output gradient are the weight's factors, the bias is an array.

Shapes: B samples, Y outputs, M images a sample, C channels, L positions of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from gradbox_engine.per_sample.rules.rule import Layer, Rule, Targets
from gradbox_factors import Block, Convolution, Geometry, Term


@dataclass(frozen=True)
class _Window:
    geometry: Geometry
    pad: tuple[int, ...] = ()  # of the input, where the two sides of a dim differ


def _bind_convolution(dims: int, *, transposed: bool) -> Callable[..., Layer | None]:
    def bind(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Layer | None:
        if input.dim() != dims + 2:
            return None
        kernel = tuple(weight.shape[2:])
        steps = _each(dilation, dims)
        pad: tuple[int, ...] = ()
        if padding == "valid":
            padding = 0
        if padding == "same":
            totals = [d * (k - 1) for d, k in zip(steps, kernel, strict=True)]
            padding = tuple(total // 2 for total in totals)
            if any(total % 2 for total in totals):
                pad = tuple(side for t in reversed(totals) for side in (t // 2, t - t // 2))
                padding = 0
        geometry = Geometry(
            kernel, _each(stride, dims), _each(padding, dims), steps, groups, transposed
        )
        return Layer(input, {"weight": weight, "bias": bias}, detail=_Window(geometry, pad))

    def bind_transposed(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Layer | None:
        return bind(input, weight, bias, stride, padding, dilation, groups)

    return bind_transposed if transposed else bind


def _each(value: Any, dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)


def _padded(layer: Layer) -> Tensor:
    pad = layer.detail.pad
    return F.pad(layer.input.detach(), pad) if pad else layer.input.detach()


def _convolution_terms(layer: Layer, x: Tensor, g: Tensor, targets: Targets) -> Iterator[Term]:
    window: Geometry = layer.detail.geometry
    dims = len(window.kernel)
    left = g.reshape(*g.shape[:2], -1, *g.shape[-dims - 1 :])
    if weight := targets.get("weight"):
        right = x.reshape(x.shape[0], -1, *x.shape[-dims - 1 :])
        yield Convolution(weight.name, weight.shape, left, right, window)
    if bias := targets.get("bias"):
        summed = left.flatten(4).sum(4).sum(2)
        yield Block(bias.name, bias.shape, summed.transpose(0, 1))


def _rule(dims: int, *, transposed: bool) -> Rule:
    return Rule(
        f"{'transposed_' if transposed else ''}convolution{dims}d",
        _bind_convolution(dims, transposed=transposed),
        _convolution_terms,
        _padded,
    )


_PLAIN: tuple[Callable[..., Any], ...] = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED: tuple[Callable[..., Any], ...] = (
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
)

RULES: dict[Callable[..., Any], Rule] = {
    function: _rule(dims, transposed=functions is _TRANSPOSED)
    for functions in (_PLAIN, _TRANSPOSED)
    for dims, function in enumerate(functions, 1)
}
