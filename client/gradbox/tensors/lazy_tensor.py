"""A tensor that is read as it is indexed: fetched from a box, or multiplied out of factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gradbox.tensors.tensor_bytes import is_torch_importable

Region = tuple[slice, ...]
"""For each of the first dims the range that is wanted, in steps of 1; later dims are read whole."""


class LazyTensor:
    """Behaves like a tensor, and reads no more of it than is indexed.

    `x[3:5]`, `x[0, 2]` and the like read that part alone. All else that a tensor can do
    (`x.norm()`, `x * 2`, `torch.equal(x, y)`) reads it whole, each time again: keep `x[:]` to do
    more with it.
    """

    def __init__(
        self, shape: tuple[int, ...], read: Callable[[Region], Any], *, dtype: Callable[[], Any]
    ) -> None:
        self.shape = shape
        self._read = read
        self._dtype = dtype

    @property
    def dtype(self) -> Any:
        return self._dtype()

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("expected a tensor with dimensions, got one without: it has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        items = index if isinstance(index, tuple) else (index,)
        region: list[slice] = []
        local: list[Any] = []
        for item, size in zip(items, self.shape, strict=False):
            if not isinstance(item, slice | int | np.integer) or isinstance(item, bool):
                break
            wanted, left = _narrowed(item, size)
            region.append(wanted)
            local.append(left)
        return self._read(tuple(region))[(*local, *items[len(local) :])]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self[()], dtype=dtype)

    def __repr__(self) -> str:
        return f"<LazyTensor {self.shape} of {self.dtype}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self[()], name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*_whole(args), **_whole(kwargs or {}))


def _operator(name: str) -> Callable[..., Any]:
    def applied(self: LazyTensor, *others: Any) -> Any:
        return getattr(self[()], name)(*_whole(others))

    return applied


# Python looks operators up on the class, past `__getattr__`.
for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow "
    "matmul rmatmul and rand or ror xor rxor invert neg pos abs lt le gt ge eq ne contains "
    "float int bool"
).split():
    setattr(LazyTensor, f"__{_name}__", _operator(f"__{_name}__"))
LazyTensor.__hash__ = object.__hash__  # type: ignore[method-assign]  # as a tensor's


def _whole(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value[()]
    if isinstance(value, tuple | list):
        return type(value)(_whole(item) for item in value)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value


def _narrowed(item: Any, size: int) -> tuple[slice, Any]:
    """Return the range that covers an index, and the index within that range."""
    if isinstance(item, slice):
        start, stop, step = item.indices(size)
        if step < 0:
            raise ValueError(f"expected a step above 0, got {item.step}: torch has no other")
        wanted = range(start, stop, step)
        last = wanted[-1] + 1 if wanted else start
        return slice(start, last), slice(None, None, step)
    position = int(item)
    if not -size <= position < size:
        raise IndexError(f"expected an index below {size}, got {position}")
    position %= size
    return slice(position, position + 1), 0


def array_of(data: bytearray | memoryview, *, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return bytes as a tensor, or as a NumPy array where there is no torch.

    Args:
        dtype: as torch and NumPy both spell it.
    """
    if not is_torch_importable():
        return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)
    import torch

    kind = getattr(torch, dtype)
    return (
        torch.frombuffer(data, dtype=kind).view(shape) if data else torch.empty(shape, dtype=kind)
    )
