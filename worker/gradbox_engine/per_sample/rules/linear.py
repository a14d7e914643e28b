"""Linear layers and matrix products: J[b, y, o, i] = Σ_t g[y, b, t, o] x[b, t, i].

Shapes: B samples, Y outputs, T positions, O rows, I columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradbox_engine.per_sample.rules.rule import Layer, Rule, Targets
from gradbox_factors import Outer, Positions, Term


def _linear_terms(layer: Layer, x: Tensor, g: Tensor, targets: Targets) -> Iterator[Term]:
    left, right = _positions(g, 2), _positions(x, 1)
    if weight := targets.get("weight"):
        yield Outer(weight.name, weight.shape, left, right, transposed=bool(layer.detail))
    if bias := targets.get("bias"):
        yield Positions(bias.name, bias.shape, left)


def _positions(x: Tensor, lead: int) -> Tensor:
    """Merge the dims between the samples and the features into one dim T."""
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


_LINEAR = Rule("linear", _bind_linear, _linear_terms)
_MATMUL = Rule("matmul", _bind_matmul, _linear_terms)
_ADDMM = Rule("addmm", _bind_addmm, _linear_terms)

RULES: dict[Callable[..., Any], Rule] = {
    F.linear: _LINEAR,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _MATMUL),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _ADDMM),
}
