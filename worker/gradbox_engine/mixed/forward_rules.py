"""Dual tensors, and forward-mode rules for operations of which one argument moves, and linearly.

A dual tensor is a value with its tangent, alive inside `torch.autograd.forward_ad.dual_level`.

torch's own rules also multiply by the constants' tangents, which are zero here: a convolution or a
matrix product runs three times where two are needed (value and tangent), a product with a number
computes the shape of its zero tangent in Python, and an evaluated batch norm, which only scales and
shifts, takes five kernels for its tangent. What is left out is zero, so the results are the same.

`grid_sample` has no rule in torch, and that of group norm takes contiguous arguments alone.

Not reached: what a Python function of `torch.nn.functional` calls on its own account, as
`multi_head_attention_forward` does, what is inside a `torch.func` transform, and scripted modules.
There torch's rules apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gradbox_engine.torch_private import inside_transform

Operation = Callable[..., Any]


def dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """Return a view of `primal` that carries a tangent of the same shape and dtype."""
    joined: Tensor = forward_ad.make_dual(primal, tangent)  # type: ignore[no-untyped-call]
    return joined


def parts(value: Any) -> tuple[Any, Tensor | None]:
    """Return primal and tangent; None for a tangent where the value is constant."""
    if not isinstance(value, Tensor):
        return value, None
    unpacked = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call]
    return unpacked.primal, unpacked.tangent


class Roundings(TorchFunctionMode):
    """Looks at the tensors that operations return.

    Attributes:
        rounding: the dtype with the fewest digits of one that is differentiated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rounding = torch.float64

    def __torch_function__(
        self,
        func: Operation,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if inside_transform():
            return func(*args, **(kwargs or {}))  # tensors of a transform do not tell tangents
        result = self.call(func, *args, **(kwargs or {}))
        if (
            isinstance(result, Tensor)
            and _is_coarser(result.dtype, self.rounding)
            and (result.requires_grad or _moves(result))
        ):
            self.rounding = result.dtype
        return result

    def call(self, func: Operation, *args: Any, **kwargs: Any) -> Any:
        """Return what an operation returns."""
        return func(*args, **kwargs)


class LeanRules(Roundings):
    """Computes tangents without products with zero, for as long as this is entered."""

    def call(self, func: Operation, *args: Any, **kwargs: Any) -> Any:
        rule = RULES.get(func)
        result = None if rule is None else rule(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result


def _layer(
    operation: Operation, input: Any, weight: Any, bias: Any = None, *rest: Any, **options: Any
) -> Tensor | None:
    """operation(x, W, b): the tangent is operation(ẋ, W, 0)."""
    primal, tangent = parts(input)
    if tangent is None or _moves(weight, bias):
        return None
    return dual(
        operation(primal, weight, bias, *rest, **options),
        operation(tangent, weight, None, *rest, **options),
    )


def _product(operation: Operation, a: Any = None, b: Any = None, **options: Any) -> Tensor | None:
    """operation(a, b), bilinear: the tangent is operation(ȧ, b), or operation(a, ḃ)."""
    (a, a_tangent), (b, b_tangent) = parts(a), parts(b)
    if options or (a_tangent is None) == (b_tangent is None):
        return None
    tangent = operation(a, b_tangent) if a_tangent is None else operation(a_tangent, b)
    return dual(operation(a, b), tangent)


def _quotient(operation: Operation, a: Any = None, b: Any = None, **options: Any) -> Tensor | None:
    """operation(a, b), linear in a: the tangent is operation(ȧ, b)."""
    return None if options else _linear(operation, a, b)


def _linear(operation: Operation, input: Any, *rest: Any, **options: Any) -> Tensor | None:
    """operation(a, …), linear in a: the tangent is operation(ȧ, …)."""
    primal, tangent = parts(input)
    if tangent is None or _moves(*rest, *options.values()):
        return None
    return dual(operation(primal, *rest, **options), operation(tangent, *rest, **options))


def _shifted_product(bias: Any, a: Any = None, b: Any = None, **options: Any) -> Tensor | None:
    """addmm, b₀ + a b: the tangent is ȧ b."""
    primal, tangent = parts(a)
    if options or tangent is None or _moves(bias, b):
        return None
    return dual(torch.addmm(bias, primal, b), torch.mm(tangent, b))


def _batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    *rest: Any,
    **options: Any,
) -> Tensor | None:
    """Batch norm by running statistics: the tangent is that of the scale alone."""
    primal, tangent = parts(input)
    if training or tangent is None or _moves(running_mean, running_var, weight, bias):
        return None
    value = F.batch_norm(primal, running_mean, running_var, weight, bias, False, *rest, **options)
    zero = torch.zeros_like(running_mean)
    return dual(
        value, F.batch_norm(tangent, zero, running_var, weight, None, False, *rest, **options)
    )


def _group_norm(input: Any, *rest: Any, **options: Any) -> Tensor | None:
    """Group norm: torch's rule, of contiguous copies where they are none."""
    primal, tangent = parts(input)
    if tangent is None:
        return None
    return F.group_norm(dual(primal.contiguous(), tangent.contiguous()), *rest, **options)


def _moves(*values: Any) -> bool:
    return any(parts(value)[1] is not None for value in values)


def _is_coarser(dtype: torch.dtype, other: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(other).eps


LAYERS: tuple[Operation, ...] = (
    F.linear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
)

PRODUCTS: tuple[Operation, ...] = (
    torch.matmul,
    torch.mm,
    torch.bmm,
    Tensor.matmul,
    Tensor.mm,
    Tensor.bmm,
    Tensor.__matmul__,
    torch.mul,
    Tensor.mul,
    Tensor.__mul__,
    Tensor.__rmul__,
)

QUOTIENTS: tuple[Operation, ...] = (torch.div, Tensor.div, Tensor.__truediv__)

RULES: dict[Operation, Callable[..., Tensor | None]] = {
    **{layer: partial(_layer, layer) for layer in LAYERS},
    **{product: partial(_product, product) for product in PRODUCTS},
    **{quotient: partial(_quotient, quotient) for quotient in QUOTIENTS},
    torch.addmm: _shifted_product,
    F.grid_sample: partial(_linear, F.grid_sample),
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
}
