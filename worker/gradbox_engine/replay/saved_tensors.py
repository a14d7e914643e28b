"""What a shard's graph holds in memory, and the choice to hold it or not.

A shard of the first pass builds a graph, unless `ungraphed` knows better. What differs is whether
the tensors that backward would need are kept: without them the graph is a few kilobytes of nodes
and the memory is that of a pass under `no_grad`. Both ways run the very same kernels; `no_grad` may
not (an LSTM's inference kernel rounds otherwise), and the results of a job would depend on how much
it could keep.

Bytes are counted by storage, each once; parameters, which are there anyway, are not counted.
"""

from __future__ import annotations

from collections.abc import Collection

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


Saved = tuple[Tensor | None, int]
"""A tensor, or None where it was let go, and the version in which it was saved."""

LET_GO: Saved = (None, 0)


class SavedTensors:
    """The tensors that one shard's backward pass needs; its graph owns them."""

    def __init__(
        self, *, limit_bytes: float, parameters: Collection[int], buffers: Collection[int]
    ) -> None:
        """Keep tensors up to a limit; above it nothing that comes is kept.

        What had come by then, at most the limit, goes with the graph, of which nobody has a use.

        Args:
            limit_bytes: 0 keeps nothing.
            parameters: addresses of the parameters' storages.
            buffers: addresses of the buffers' storages. What a graph saves of a buffer is copied,
                for later shards write to it.
        """
        self.num_bytes = 0
        self.kept = limit_bytes > 0
        self._limit_bytes = limit_bytes
        self._buffers = buffers
        self._counted = set(parameters)

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context in which the shard's forward pass runs."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Saved:
        if not self.kept:
            return LET_GO
        # Without its place in the graph: a node that owned its own output would never be freed.
        tensor = tensor.detach()
        if tensor.layout is not torch.strided:
            self._count(_bytes_of(tensor))
        else:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address not in self._counted:
                if address in self._buffers:
                    tensor = tensor.clone()
                    self._count(tensor.nbytes)
                else:
                    self._counted.add(address)
                    self._count(storage.nbytes())
        return (tensor, tensor._version) if self.kept else LET_GO

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.kept = self.num_bytes <= self._limit_bytes


def _bytes_of(tensor: Tensor) -> int:
    if tensor.layout is torch.sparse_coo:  # which has no nbytes
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def _unpack(saved: Saved) -> Tensor:
    tensor, version = saved
    if tensor is None:
        raise GraphDropped("the graph of this shard was not kept")
    if tensor._version != version:
        raise RuntimeError(
            "a tensor needed for the gradient was modified by an in-place operation: "
            f"{tuple(tensor.shape)} is at version {tensor._version}, expected {version}"
        )
    return tensor
