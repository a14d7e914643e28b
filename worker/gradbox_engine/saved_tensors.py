"""What a shard's graph holds in memory, and the choice to hold it or not.

A shard of the first pass always builds a graph. What differs is whether the tensors that backward
would need are kept: without them the graph is a few kilobytes of nodes and the memory is that of a
pass under `no_grad`. Both ways run the very same kernels; `no_grad` would not (an LSTM's inference
kernel rounds otherwise), and the results of a job would depend on how much it could keep.

Bytes are counted by storage, each once; parameters, which are there anyway, are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor


class GraphDropped(RuntimeError):
    """A backward pass asked for tensors of a graph that was not kept."""


def needs_its_own_graph(error: BaseException | None) -> bool:
    """Return whether a model failed because it differentiates in its own forward pass.

    By `torch.autograd.grad` it then asks for tensors that were let go; by `torch.func` it meets
    torch's refusal to combine that with hooks on saved tensors.
    """
    return isinstance(error, GraphDropped) or "saved tensor hooks" in str(error)


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Saved:
    tensor: Tensor | None
    version: int


class SavedTensors:
    """The tensors that one shard's backward pass needs."""

    def __init__(
        self, *, limit_bytes: float, parameters: Collection[int], buffers: Collection[int]
    ) -> None:
        """Keep tensors up to a limit; above it all are let go, and so are those still to come.

        Args:
            limit_bytes: 0 keeps nothing.
            parameters: addresses of the parameters' storages.
            buffers: addresses of the buffers' storages. What a graph saves of a buffer is copied,
                for later shards write to it.
        """
        self.num_bytes = 0
        self.kept = limit_bytes > 0
        self._limit_bytes = limit_bytes
        self._parameters = parameters
        self._buffers = buffers
        self._counted: set[int] = set()
        # The graph owns these, so that a backward pass frees them as it goes.
        self._saved: list[weakref.ref[_Saved]] = []

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context in which the shard's forward pass runs."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def drop(self) -> None:
        """Let go of everything; the graph can no longer be used."""
        self.kept = False
        for reference in self._saved:
            saved = reference()
            if saved is not None:
                saved.tensor = None
        self._saved.clear()
        self._counted.clear()

    def _pack(self, tensor: Tensor) -> _Saved:
        if not self.kept:
            return _Saved(None, 0)
        saved = self._hold(tensor.detach())
        self._saved.append(weakref.ref(saved))
        if self.num_bytes > self._limit_bytes:
            self.drop()
        return saved

    def _hold(self, tensor: Tensor) -> _Saved:
        if tensor.layout != torch.strided:
            self.num_bytes += tensor.nbytes
            return _Saved(tensor, tensor._version)
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._buffers:
            tensor = tensor.clone()
            self.num_bytes += tensor.untyped_storage().nbytes()
        elif address not in self._parameters and address not in self._counted:
            self._counted.add(address)
            self.num_bytes += storage.nbytes()
        return _Saved(tensor, tensor._version)

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.tensor is None:
            raise GraphDropped("the graph of this shard was not kept")
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "a tensor needed for the gradient was modified by an in-place operation: "
                f"{tuple(saved.tensor.shape)} is at version {saved.tensor._version}, expected "
                f"{saved.version}"
            )
        return saved.tensor
