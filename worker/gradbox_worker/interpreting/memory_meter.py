"""The memory that a function may take, held while it runs.

A `Meter` sits below autograd and sees every kernel call. Before each it runs the call on meta
tensors of the same shapes, which takes no memory, and adds up the bytes of the new tensors; the
call that would exceed the budget is refused before it allocates. Much of torch's meta kernels is
Python, 0.3 ms for a product, so what a call takes is foreseen once for the same shapes, as those of
shard after shard. And a call that works entry by entry, or reduces, is bounded by its
arguments' entries instead where that much fits, and its tensors are counted once they are there.
The sum counts what is freed in between as well. It counts what calls return: neither what a kernel
allocates for itself (a copy of an expanded input, say) nor the backward. For these whoever runs the
function needs a hard limit, as the worker has.

Calls whose result's size depends on values have no meta form. For indexing by a mask the meter
counts the mask; for the others in `_BOUNDS` it takes an upper bound. Any other call without a meta
form runs and is counted afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, Final

import torch

from gradbox.errors import GraphRefused
from gradbox_engine.torch_private import TorchDispatchMode

_GIB: Final = 2**30
# What results have at most one entry for each of the arguments' common shape.
_BY_ENTRY: Final = {torch.Tag.pointwise, getattr(torch.Tag, "reduction", torch.Tag.pointwise)}
_WIDEST_BYTES: Final = 16
_MOST_FORESEEN: Final = 1000
_foreseen: Final[dict[Any, int | None]] = {}


def metered(function: Callable[..., Any], *, budget_bytes: int) -> Callable[..., Any]:
    """Return the function, refusing to allocate more than a budget in one call.

    Raises, when called:
        GraphRefused: the tensors that one call makes exceed the budget together.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with Meter(budget_bytes=budget_bytes):
            return function(*args, **kwargs)

    return call


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, new tensors count against a budget.

    `spent_bytes` is what they took so far.
    """

    def __init__(self, *, budget_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.budget_bytes = budget_bytes
        self.spent_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        makes = _makes(func)
        if not any(makes):
            return func(*args, **kwargs)
        most = _most(func, makes, args, kwargs)
        if most is not None and self.spent_bytes + most <= self.budget_bytes:
            result = func(*args, **kwargs)
            self._spend(_new_bytes(result, makes), func)
            return result
        needed = _foresee(func, makes, args, kwargs)
        if needed is not None:
            self._spend(needed, func)
            return func(*args, **kwargs)
        bound = _BOUNDS.get(func.overloadpacket, _no_bound)(*args, **kwargs)
        if self.spent_bytes + bound > self.budget_bytes:
            self._spend(bound, func)
        result = func(*args, **kwargs)
        self._spend(_new_bytes(result, makes), func)
        return result

    def _spend(self, num_bytes: int, func: Any) -> None:
        self.spent_bytes += num_bytes
        if self.spent_bytes > self.budget_bytes:
            raise GraphRefused(
                f"the function's tensors take {self.spent_bytes / _GIB:.3g} GiB with {func}, and "
                f"{self.budget_bytes / _GIB:.3g} GiB are allowed: pairs or triplets of all samples "
                "grow with their square or cube; use fewer samples or a sum over parts"
            )


def _makes(func: Any) -> list[bool]:
    """Tell for each result whether it is a new tensor, and not a view or the argument itself."""
    return [result.alias_info is None for result in func._schema.returns]


def _most(func: Any, makes: list[bool], args: Any, kwargs: Any) -> int | None:
    """Return a bound of the bytes that a call will make where its entries give one, else None."""
    if not _BY_ENTRY.intersection(func.tags):
        return None
    num = 1
    shapes = [tensor.shape[::-1] for tensor in _tensors((*args, *kwargs.values()))]
    for sizes in zip_longest(*shapes, fillvalue=1):
        num *= max(sizes)
    return num * _WIDEST_BYTES * len(makes)


def _foresee(func: Any, makes: list[bool], args: Any, kwargs: Any) -> int | None:
    """Return the bytes of the new tensors that a call will make; None where shapes don't say."""
    form = (func, _form(args), _form(kwargs))
    if form in _foreseen:
        return _foreseen[form]
    try:
        found = _new_bytes(func(*_meta(args), **_meta(kwargs)), makes)
    except (NotImplementedError, RuntimeError, IndexError, ValueError, TypeError):
        found = None
    if len(_foreseen) >= _MOST_FORESEEN:
        _foreseen.clear()
    _foreseen[form] = found
    return found


def _form(value: Any) -> Any:
    """Return what is equal for arguments on which the meta call of a function is the same."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return type(value), tuple(_form(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((name, _form(item)) for name, item in value.items())
    return type(value), repr(value)  # 1, 1.0 and True are equal, and nan is not equal to itself


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, list | tuple):
        return type(value)(_meta(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _meta(item) for key, item in value.items()}
    return value


def _new_bytes(result: Any, makes: list[bool]) -> int:
    results = result if isinstance(result, tuple | list) and len(makes) > 1 else (result,)
    return sum(
        tensor.numel() * tensor.element_size()
        for item, new in zip(results, makes, strict=False)
        if new
        for tensor in _tensors(item)
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _no_bound(*args: Any, **kwargs: Any) -> int:
    return 0


def _nonzero(tensor: torch.Tensor) -> int:
    return tensor.numel() * max(tensor.ndim, 1) * 8


def _selected(tensor: torch.Tensor, mask: torch.Tensor) -> int:
    shape: tuple[int, ...] = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    return math.prod(shape) * tensor.element_size()


def _indexed(tensor: torch.Tensor, indices: Any, *rest: Any, **kwargs: Any) -> int:
    """Return the size of tensor[indices]; a mask is one index for each entry that it names."""
    dim, kept, shapes = 0, 1, []
    for index in indices:
        if index is None:
            kept *= math.prod(tensor.shape[dim : dim + 1])
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            shapes.append((int(torch.count_nonzero(index)),))
            dim += index.ndim
        else:
            shapes.append(tuple(index.shape))
            dim += 1
    try:
        num = math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:  # torch will refuse the call
        return 0
    return num * kept * math.prod(tensor.shape[dim:]) * tensor.element_size()


def _uniques(tensor: torch.Tensor, *rest: Any, **kwargs: Any) -> int:
    return tensor.numel() * (tensor.element_size() + 16)


def _counts(tensor: torch.Tensor, weights: Any = None, minlength: int = 0) -> int:
    return max(int(tensor.max()) + 1 if tensor.numel() else 0, minlength) * 8


def _repeated(repeats: torch.Tensor, *rest: Any, **kwargs: Any) -> int:
    return int(repeats.sum()) * 8


def _histogram(tensor: torch.Tensor, bins: int = 100, *rest: Any, **kwargs: Any) -> int:
    return bins * tensor.element_size()


def _alignments(log_probs: torch.Tensor, targets: torch.Tensor, *rest: Any, **kwargs: Any) -> int:
    length = targets.shape[-1] if targets.ndim > 1 else targets.numel()
    positions = log_probs.numel() // max(log_probs.shape[-1], 1)
    return positions * (2 * length + 1) * log_probs.element_size()


_aten: Final = torch.ops.aten
_BOUNDS: Final[dict[Any, Callable[..., int]]] = {
    _aten.nonzero: _nonzero,
    _aten.masked_select: _selected,
    _aten.index: _indexed,
    _aten._unique2: _uniques,
    _aten.unique_dim: _uniques,
    _aten.unique_consecutive: _uniques,
    _aten.bincount: _counts,
    _aten.repeat_interleave: _repeated,
    _aten.histc: _histogram,
    _aten._ctc_loss: _alignments,
}
