"""Tensors as NumPy buffers, on their way between the processes of a cluster.

Ray keeps the bytes of an array beside its pickle, in shared memory, and hands them on without a
copy; a torch tensor it would pickle whole. A buffer is the tensor's bytes with its dtype and shape,
for NumPy has no bfloat16. Whatever holds tensors (a dataclass, a dict, a sequence) is walked. Of
rows that are kept as factors a tensor that several terms have is one buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from gradbox.tensors.tensor_bytes import bytes_in_order
from gradbox_factors import Factored
from gradbox_factors.term import identity

# What torch warns of where it makes a tensor of memory that is shared.
READ_ONLY: Final = "The given NumPy array is not writable"
HOST: Final = torch.device("cpu")

Change = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class TensorBuffer:
    """A tensor's bytes in order, its dtype and its shape."""

    data: numpy.ndarray[Any, numpy.dtype[numpy.uint8]]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorBuffer:
        """Return a tensor's buffer; that of a contiguous tensor on the CPU is the tensor's own."""
        data = numpy.asarray(bytes_in_order(tensor))
        return cls(data, tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.data.nbytes

    def tensor(self, *, copy: bool) -> Tensor:
        """Return the tensor; without a copy it must not be written to."""
        if not len(self.data):
            return torch.empty(self.shape, dtype=self.dtype)
        data = self.data.copy() if copy else self.data
        return torch.from_numpy(data).view(self.dtype).reshape(self.shape)


def as_buffers(value: Any) -> Any:
    """Return the value with a buffer for every tensor."""
    return _walked(value, Tensor, TensorBuffer.of, lambda: _once(TensorBuffer.of, identity))


def as_tensors(value: Any, *, copy: bool = True, device: torch.device = HOST) -> Any:
    """Return the value with a tensor for every buffer.

    Args:
        copy: whether the tensors may be written to: the memory of buffers is shared. Factors may
            not in any case.
        device: where they are to be.
    """

    def change(found: TensorBuffer, *, copy: bool = copy) -> Tensor:
        return found.tensor(copy=copy).to(device)

    return _walked(value, TensorBuffer, change, lambda: _once(partial(change, copy=False), id))


def num_bytes(value: Any) -> int:
    """Return how many bytes the tensors or buffers in a value have."""
    sizes: list[int] = []

    def add(found: Tensor | TensorBuffer) -> Tensor | TensorBuffer:
        sizes.append(found.nbytes)
        return found

    def key(found: Tensor | TensorBuffer) -> Hashable:
        return identity(found) if isinstance(found, Tensor) else id(found)

    _walked(value, (Tensor, TensorBuffer), add, lambda: _once(add, key))
    return sum(sizes)


def _once(change: Change, key: Callable[[Any], Hashable]) -> Change:
    """Return what changes each thing once."""
    changed: dict[Hashable, Any] = {}

    def change_once(found: Any) -> Any:
        if key(found) not in changed:
            changed[key(found)] = change(found)
        return changed[key(found)]

    return change_once


def _walked(value: Any, kind: Any, change: Change, of_factors: Callable[[], Change]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Factored):  # whose pieces may be read from a file one by one
        change = of_factors()
        return Factored([_walked(dict(p), kind, change, of_factors) for p in value.pieces])
    if is_dataclass(value) and not isinstance(value, type | TensorBuffer):
        changed = {
            f.name: _walked(getattr(value, f.name), kind, change, of_factors) for f in fields(value)
        }
        return replace(value, **changed)
    if isinstance(value, dict):
        return {key: _walked(entry, kind, change, of_factors) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_walked(entry, kind, change, of_factors) for entry in value)
    return value
