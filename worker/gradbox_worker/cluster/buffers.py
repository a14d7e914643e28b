"""Tensors as NumPy buffers, on their way between the processes of a cluster.

Ray keeps the bytes of an array beside its pickle, in shared memory, and hands them on without a
copy; a torch tensor it would pickle whole. A buffer is the tensor's bytes with its dtype and shape,
for NumPy has no bfloat16. Whatever holds tensors (a dataclass, a dict, a sequence) is walked. Rows
that are kept as factors travel as the buffers of these, each once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from gradbox.tensors.tensor_bytes import bytes_in_order
from gradbox_factors import Factored, packed, unpacked

# What torch warns of where it makes a tensor of memory that is shared.
READ_ONLY: Final = "The given NumPy array is not writable"
HOST: Final = torch.device("cpu")


@dataclass(frozen=True)
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

    def tensor(self, *, copy: bool) -> Tensor:
        """Return the tensor; without a copy it must not be written to."""
        if not len(self.data):
            return torch.empty(self.shape, dtype=self.dtype)
        data = self.data.copy() if copy else self.data
        return torch.from_numpy(data).view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class FactorBuffers:
    """Factors, each once though several terms have it, and which of them make which term."""

    tensors: Mapping[str, TensorBuffer]
    pieces: Sequence[Sequence[Mapping[str, Any]]]

    @classmethod
    def of(cls, factors: Factored) -> FactorBuffers:
        """Return the factors' buffers, which share their memory."""
        tensors, pieces = packed(factors.pieces)
        return cls(as_buffers(tensors), pieces)

    def factored(self, device: torch.device) -> Factored:
        """Return the factors, which must not be written to."""
        tensors = {name: b.tensor(copy=False).to(device) for name, b in self.tensors.items()}
        return Factored(unpacked(tensors, self.pieces))


def as_buffers(value: Any) -> Any:
    """Return the value with a buffer for every tensor, and for every factored array."""

    def change(found: Tensor | Factored) -> Any:
        return FactorBuffers.of(found) if isinstance(found, Factored) else TensorBuffer.of(found)

    return _walked(value, (Tensor, Factored), change)


def as_tensors(value: Any, *, copy: bool = True, device: torch.device = HOST) -> Any:
    """Return the value with a tensor for every buffer, and factored arrays.

    Args:
        copy: whether the tensors may be written to: the memory of buffers is shared. Factors may
            not in any case.
        device: where they are to be.
    """

    def change(found: TensorBuffer | FactorBuffers) -> Any:
        if isinstance(found, FactorBuffers):
            return found.factored(device)
        return found.tensor(copy=copy).to(device)

    return _walked(value, (TensorBuffer, FactorBuffers), change)


def num_bytes(value: Any) -> int:
    """Return how many bytes the tensors or buffers in a value have."""
    total = 0

    def add(found: Any) -> Any:
        nonlocal total
        if isinstance(found, Factored):
            tensors: Any = packed(found.pieces)[0]
        else:
            tensors = found.tensors if isinstance(found, FactorBuffers) else {"": found}
        total += sum(x.nbytes if isinstance(x, Tensor) else x.data.nbytes for x in tensors.values())
        return found

    _walked(value, (Tensor, Factored, TensorBuffer, FactorBuffers), add)
    return total


def _walked(value: Any, kind: Any, change: Any) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, TensorBuffer | FactorBuffers):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: _walked(getattr(value, f.name), kind, change) for f in fields(value)}
        return replace(value, **changed)
    if isinstance(value, dict):
        return {key: _walked(entry, kind, change) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_walked(entry, kind, change) for entry in value)
    return value
