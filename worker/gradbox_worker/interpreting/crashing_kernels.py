"""Calls on which a kernel of torch crashes, never returns, or reads beyond its argument's memory.

Found in torch 2.13 on a CPU by calling every allowed operation with arguments that no person would
write. Each is refused, or computed in another way; all other calls go to the kernel as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from gradbox.errors import GraphRefused

MAX_DIMS: Final = 64  # of a tensor that torch's kernels take


def without_crashes(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the allow-list, or a method, that never makes such a call.

    Args:
        name: its name on the allow-list, or a method's.
        function: what it computes with.
    """
    kind = name.rpartition(".")[2]
    if kind in ("median", "nanmedian"):
        return _laid_out(function)
    if kind in ("div", "div_", "divide", "divide_"):
        return _truncated(name, function)
    if kind in ("lcm", "lcm_"):
        return _without_lowest(name, function)
    if kind == "matrix_power":
        return _powered(name, function)
    if kind == "combinations":
        return _over_dims(name, function, place=1, key="r")
    if kind == "tensordot":
        return _over_dims(name, function, place=2, key="dims")
    if kind == "pdist":
        return _occupied(name, function, place=0, key="input", dim=0, what="rows")
    if kind == "lstsq":
        return _occupied(name, function, place=1, key="B", dim=-1, what="right-hand sides")
    return function


def as_number(value: Any) -> Any:
    """Return the number in an integer tensor of one entry, and any other value as it is.

    Where torch takes an integer, it takes such a tensor as well and reads it.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.ndim < 2:
        return value if value.is_floating_point() or value.is_complex() else value.item()
    return value


def _laid_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lay an expanded tensor out: along its dimensions of stride 0 the kernel reads on in memory.

    It takes as many entries of the memory behind the tensor's own as the dimension has, which may
    be another job's.
    """

    def call(input: Any, *args: Any, **kwargs: Any) -> Any:
        expanded = isinstance(input, torch.Tensor) and 0 in input.stride()
        return function(input.contiguous() if expanded else input, *args, **kwargs)

    return call


def _truncated(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse an integer division whose result overflows: the processor ends the process (SIGFPE).

    The lowest integer by -1 is the only one. Any of the one and any of the other are refused.
    """

    def call(input: Any, other: Any, **kwargs: Any) -> Any:
        dtype = torch.result_type(input, other) if kwargs.get("rounding_mode") == "trunc" else None
        if dtype in (torch.int32, torch.int64):
            lowest = torch.iinfo(dtype).min
            dividend, divisor = (torch.as_tensor(value).to(dtype) for value in (input, other))
            if (divisor == -1).any() and (dividend == lowest).any():
                raise GraphRefused(
                    f"{name} truncates {lowest} / -1, which no {dtype} holds: divide "
                    "floating-point numbers, or integers above the lowest"
                )
        return function(input, other, **kwargs)

    return call


def _without_lowest(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse the lowest integer: the kernel divides it by -1, its greatest divisor (SIGFPE)."""

    def call(input: Any, other: Any, **kwargs: Any) -> Any:
        dtype = torch.result_type(input, other)
        if dtype in (torch.int32, torch.int64):
            lowest = torch.iinfo(dtype).min
            if any((torch.as_tensor(value).to(dtype) == lowest).any() for value in (input, other)):
                raise GraphRefused(
                    f"{name} is given {lowest}, whose multiples no {dtype} holds: give it integers "
                    "above the lowest"
                )
        return function(input, other, **kwargs)

    return call


def _over_dims(
    name: str, function: Callable[..., Any], *, place: int, key: str
) -> Callable[..., Any]:
    """Refuse a number of dimensions that no tensor has, before it is counted up to.

    `combinations` makes a grid of one dimension for each place of a tuple, and before it a
    view for each: the sizes of 10,000 would fill the memory. `tensordot`
    lists the dimensions.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        num_dims = as_number(kwargs.get(key, args[place] if len(args) > place else 0))
        if isinstance(num_dims, int) and num_dims > MAX_DIMS:
            raise GraphRefused(f"{name} is given {key}={num_dims}: it is at most {MAX_DIMS}")
        return function(*args, **kwargs)

    return call


def _powered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse the one exponent that has no absolute value: the kernel would count for ever."""

    def call(*args: Any, **kwargs: Any) -> Any:
        exponent = as_number(kwargs.get("n", args[1] if len(args) > 1 else 0))
        if isinstance(exponent, int) and exponent <= -(2**63):
            raise GraphRefused(f"{name} is given the power {exponent}: it is at least -(2**63 - 1)")
        return function(*args, **kwargs)

    return call


def _occupied(
    name: str, function: Callable[..., Any], *, place: int, key: str, dim: int, what: str
) -> Callable[..., Any]:
    """Refuse an argument with nothing along a dimension, where the kernels crash.

    `pdist` does in its backward, and `lstsq` in the driver "gelss" of LAPACK.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        value = kwargs.get(key, args[place] if len(args) > place else None)
        if isinstance(value, torch.Tensor) and value.ndim and not value.shape[dim]:
            raise GraphRefused(
                f"{name} is given no {what}, and one or more were expected: leave empty tensors out"
            )
        return function(*args, **kwargs)

    return call
