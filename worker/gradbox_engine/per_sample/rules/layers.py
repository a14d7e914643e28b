"""The rules: what a layer's parameters get, from the layer's input and its output's gradient.

One registry, keyed by function and not by module. A rule has two halves: `bind` reads a call's
arguments and says which of them are parameters (None: this use has no rule), and `terms` makes the
factors out of the input x (B, ...) and the output gradient g (Y, B, ...), samples leading.

Shapes: B samples, Y outputs, T positions, M images a sample, C channels, L positions of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradbox_engine.per_sample.errors import CoupledSamples
from gradbox_factors import Block, Convolution, Geometry, Lookup, Outer, Positions, Term


@dataclass(frozen=True)
class Layer:
    """One call of a function that has a rule.

    Args:
        input: what the parameters act on.
        parameters: role → tensor, of those that may be parameters.
        detail: what `terms` needs beside them.
        first_dims: how many leading dims of `input` may hold the samples.
    """

    input: Tensor
    parameters: Mapping[str, Tensor | None]
    detail: Any = None
    first_dims: int = 1


@dataclass(frozen=True)
class Target:
    """The parameter that a role stands for."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


Targets = Mapping[str, Target]


@dataclass(frozen=True)
class Rule:
    """How one function's parameters get their factors."""

    name: str
    bind: Callable[..., Layer | None]
    terms: Callable[[Layer, Tensor, Tensor, Targets], Iterator[Term]]
    prepare: Callable[[Layer], Tensor] = field(default=lambda layer: layer.input.detach())


RULES: dict[Callable[..., Any], Rule] = {}


def _register(rule: Rule, *functions: Callable[..., Any]) -> None:
    for function in functions:
        RULES[function] = rule


def _linear_terms(layer: Layer, x: Tensor, g: Tensor, targets: Targets) -> Iterator[Term]:
    left, right = _positions(g, 2), _positions(x, 1)
    if weight := targets.get("weight"):
        yield Outer(weight.name, weight.shape, left, right, transposed=bool(layer.detail))
    if bias := targets.get("bias"):
        yield from _bias(bias, left)


def _bias(bias: Target, left: Tensor) -> Iterator[Term]:
    """A bias of the layer's width; one number that is added to all of it has no rule here."""
    yield Positions(bias.name, bias.shape, left)


def _positions(x: Tensor, lead: int) -> Tensor:
    """Merge what lies between the samples and the features into one dim T."""
    if x.dim() == lead + 2:
        return x
    return x.unsqueeze(lead) if x.dim() == lead + 1 else x.flatten(lead, -2)


def _bind_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Layer | None:
    if weight.dim() != 2 or input.dim() < 2:
        return None
    return Layer(input, {"weight": weight, "bias": bias}, first_dims=input.dim() - 1)


def _bind_matmul(input: Tensor, other: Tensor) -> Layer | None:
    if other.dim() != 2 or input.dim() < 2:
        return None
    return Layer(input, {"weight": other}, detail=True, first_dims=input.dim() - 1)


def _bind_addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Layer | None:
    if beta != 1 or alpha != 1 or input.shape != mat2.shape[1:]:
        return None
    return Layer(mat1, {"weight": mat2, "bias": input}, detail=True)


_register(Rule("linear", _bind_linear, _linear_terms), F.linear)
_register(
    Rule("matmul", _bind_matmul, _linear_terms),
    torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__,
)  # fmt: skip
_register(Rule("addmm", _bind_addmm, _linear_terms), torch.addmm, Tensor.addmm)


def _bind_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Layer | None:
    if scale_grad_by_freq:
        raise CoupledSamples(
            "an embedding divides its gradient by how often an index occurs in the whole batch "
            "(scale_grad_by_freq=True), so a sample has no gradient of its own: build the "
            "embedding with scale_grad_by_freq=False"
        )
    if max_norm is not None:
        return None
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return Layer(input, {"weight": weight}, detail=padding_idx, first_dims=input.dim())


def lookup(ids: Tensor, g: Tensor, weight: Target, padding_idx: int | None) -> Lookup:
    """Return the term of an embedding: ids (B, ...) and g (Y, B, ..., D)."""
    ids_BT = ids.reshape(ids.shape[0], -1)
    left = g.reshape(g.shape[0], ids_BT.shape[0], ids_BT.shape[1], g.shape[-1])
    if padding_idx is not None and bool((ids_BT == padding_idx).any()):
        left = left * (ids_BT != padding_idx)[..., None]
    return Lookup(weight.name, weight.shape, left, ids_BT)


def _embedding_terms(layer: Layer, x: Tensor, g: Tensor, targets: Targets) -> Iterator[Term]:
    yield lookup(x, g, targets["weight"], layer.detail)


_register(Rule("embedding", _bind_embedding, _embedding_terms), F.embedding)


@dataclass(frozen=True)
class _Walk:
    geometry: Geometry
    pad: tuple[int, ...] = ()  # of the input, where both sides of a dim differ


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
        walk = Geometry(
            kernel, _each(stride, dims), _each(padding, dims), steps, groups, transposed
        )
        return Layer(input, {"weight": weight, "bias": bias}, detail=_Walk(walk, pad))

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
    walk: Geometry = layer.detail.geometry
    dims = len(walk.kernel)
    left = g.reshape(*g.shape[:2], -1, *g.shape[-dims - 1 :])
    if weight := targets.get("weight"):
        right = x.reshape(x.shape[0], -1, *x.shape[-dims - 1 :])
        yield Convolution(weight.name, weight.shape, left, right, walk)
    if bias := targets.get("bias"):
        # The Block is small beside the layer's factors: O numbers against O·L.
        summed = left.flatten(4).sum(4).sum(2)
        yield Block(bias.name, bias.shape, summed.transpose(0, 1))


for _dims, _plain, _transposed in (
    (1, F.conv1d, F.conv_transpose1d),
    (2, F.conv2d, F.conv_transpose2d),
    (3, F.conv3d, F.conv_transpose3d),
):
    for _function, _turned in ((_plain, False), (_transposed, True)):
        _register(
            Rule(
                f"{'transposed_' if _turned else ''}convolution{_dims}d",
                _bind_convolution(_dims, transposed=_turned),
                _convolution_terms,
                _padded,
            ),
            _function,
        )
