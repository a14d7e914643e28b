"""Python arithmetic inside a graph, held to sizes that a tensor could have.

On tensors an operator is torch's. On Python numbers and sequences it can be an attack: 10**10**10,
a list repeated a billion times, a billion views of one expanded tensor. Each function here behaves
as the one it stands for and refuses such operands before it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from gradbox.errors import GraphRefused
from gradbox.graphs import allow_list
from gradbox.graphs.check import MAX_INTEGER, MAX_LIST, names_device
from gradbox_worker.interpreting.crashing_kernels import as_number
from gradbox_worker.interpreting.kernel_arguments import with_checked_arguments

MAX_PIECES: Final = 16_384  # tensors that one call may return

_NUMBER = (bool, int, float, complex)
_COMPARED = (*_NUMBER, str, tuple, list, torch.dtype, torch.device, type(None))
# What takes a device; `build` gives the job's to the other factories.
_PLACED: Final = frozenset(
    "to new_full new_ones new_zeros torch.full_like torch.ones_like torch.zeros_like".split()
)
# What has entries: those of a mapping have keys, so it is not unpacked.
_HOLDERS: Final[dict[str, tuple[type, ...]]] = {
    "operator.getitem": (torch.Tensor, tuple, list, Mapping),
    "operator.setitem": (torch.Tensor,),
    allow_list.LENGTH: (torch.Tensor, tuple, list),
}


def with_bounds(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the allow-list, with its bounds when it needs any.

    Args:
        name: its name on the allow-list, or a method's.
        function: what it computes with.
    """
    if name in _HOLDERS:
        return _item(name, function)
    if name in ("operator.eq", "operator.ne", *allow_list.EXTREMES):
        return _compare(name, function)
    if name in allow_list.OPERATORS or name in allow_list.MATH:
        return _calculate(name, function)
    if name.rpartition(".")[2] in allow_list.PIECES:
        return _cut(name, function)
    if name in _PLACED:
        return _place(name, function)
    return with_checked_arguments(name, function)


def _item(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    holders = _HOLDERS[name]

    def call(holder: Any, *rest: Any) -> Any:
        if not isinstance(holder, holders):
            raise GraphRefused(
                f"{name} on a {type(holder).__name__}: "
                f"{' or '.join(kind.__name__ for kind in holders)} was expected"
            )
        return function(holder, *rest)

    return call


def _place(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a device that is computed or comes from a loss input; one is read off a tensor."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if names_device(kwargs.get("device")) or (name == "to" and any(map(names_device, args))):
            raise GraphRefused(f"{name} is given a device by its name: a graph does not choose one")
        return function(*args, **kwargs)

    return call


def _compare(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(left: Any, right: Any) -> Any:
        _expect(name, (left, right), (torch.Tensor, *_COMPARED))
        return function(left, right)

    return call


def _calculate(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    guard = {
        "operator.pow": _check_power,
        "operator.ipow": _check_power,
        "math.pow": _check_power,
        "operator.ilshift": _check_shift,
        "operator.lshift": _check_shift,
    }.get(name)
    joins = name in ("operator.add", "operator.iadd")

    def call(*operands: Any) -> Any:
        if joins and all(isinstance(value, tuple | list) for value in operands):
            return _join(name, operands)
        _expect(name, operands, (torch.Tensor, *_NUMBER))
        if guard and all(isinstance(value, int) for value in operands):
            guard(name, *operands)
        result = function(*operands)
        if isinstance(result, int) and abs(result) > MAX_INTEGER:
            raise GraphRefused(f"{name} makes an integer that does not fit into 64 bits")
        return result

    return call


def _join(name: str, sequences: tuple[Any, ...]) -> Any:
    if sum(map(len, sequences)) > MAX_LIST:
        raise GraphRefused(f"{name} makes a sequence of more than {MAX_LIST} entries")
    left, right = sequences
    return left + type(left)(right)


def _check_power(name: str, base: int, exponent: int) -> None:
    if exponent > 0 and abs(base).bit_length() * exponent > 128:
        raise GraphRefused(f"{name} makes an integer that does not fit into 64 bits")


def _check_shift(name: str, value: int, shift: int) -> None:
    if shift > 63:
        raise GraphRefused(f"{name} makes an integer that does not fit into 64 bits")


def _cut(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    kind = name.rpartition(".")[2]

    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and (
            (num := _num_pieces(kind, tensor, args, kwargs)) > MAX_PIECES
        ):
            raise GraphRefused(f"{name} makes {num} tensors, more than {MAX_PIECES}")
        return function(tensor, *args, **kwargs)

    return call


def _num_pieces(kind: str, tensor: torch.Tensor, args: Any, kwargs: Mapping[str, Any]) -> int:
    """Return how many tensors a call makes, or more; 0 where torch will refuse the call."""
    args = tuple(_piece_argument(kind, value) for value in args)
    kwargs = {key: _piece_argument(kind, value) for key, value in kwargs.items()}
    given = (*args, *kwargs.values())
    if any(isinstance(value, list | tuple) for value in given):
        return MAX_LIST
    if any(isinstance(value, torch.Tensor) for value in given):
        return max(value.numel() for value in given if isinstance(value, torch.Tensor)) + 1
    if kind == "unbind":
        return _length(tensor, kwargs.get("dim", args[0] if args else 0))
    size = next((value for value in given if isinstance(value, int)), 0)
    if kind != "split":
        return size
    length = _length(tensor, kwargs.get("dim", args[1] if len(args) > 1 else 0))
    size = kwargs.get("split_size", kwargs.get("split_size_or_sections", size))
    return math.ceil(length / size) if isinstance(size, int) and size > 0 else 0


def _piece_argument(kind: str, value: Any) -> Any:
    """Return the number that a tensor stands for; one entry of `tensor_split` may be an index."""
    indices = kind == "tensor_split" and isinstance(value, torch.Tensor) and value.ndim > 0
    return value if indices else as_number(value)


def _length(tensor: torch.Tensor, dim: Any) -> int:
    if not isinstance(dim, int) or not -tensor.ndim <= dim < tensor.ndim:
        return 0
    return tensor.shape[dim]


def _expect(name: str, values: tuple[Any, ...], kinds: tuple[type, ...]) -> None:
    for value in values:
        if not isinstance(value, kinds):
            raise GraphRefused(
                f"{name} on a {type(value).__name__}: tensors and numbers were expected"
            )
