"""What a shard's graph holds in memory.

On CUDA the allocator knows. Elsewhere the tensors that the forward pass saves for its backward
pass are counted by torch's hooks on saved tensors: bytes by storage, each once, without the
parameters, which are there anyway. The first graph of arguments of given shapes is counted, those
after it are taken to be as large: where data decide what a model saves, that is a guess.

A graph that is to outlive the job goes through the hooks on every device: it then holds aliases of
the tensors as they are now, whatever data the model's parameters point to later, and copies of
buffers.

Cost: about 10 µs for each tensor that a graph saves under the hooks.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.errors import ModelCallFailed
from gradbox_engine.model.calling.calls import ShardGraph
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.prepared import Prepared
from gradbox_engine.model.tensor_equality import is_plain, storages_of
from gradbox_engine.torch_private import version_of, without_numbers

Saved = tuple[Tensor, int]
"""A tensor and the version in which it was saved."""


class GraphSizes:
    """How many bytes the graphs of a job's shards hold."""

    def __init__(self, prepared: Prepared, *, outlive_the_job: bool) -> None:
        self._prepared = prepared
        self._outlive_the_job = outlive_the_job
        self._known: dict[Hashable, int] = {}

    def counted(
        self, position: Position, arguments: dict[str, Any]
    ) -> tuple[ShardGraph, int] | None:
        """Put a shard through the model and return its graph with the bytes that it holds.

        Returns:
            None where the model cannot be called under hooks, as `torch.func` refuses them, or at
            all, which a call without them tells.
        """
        ready = self._prepared
        call = partial(ready.calls, position, arguments, with_penalties=True)
        tensors = {n: v for n, v in arguments.items() if isinstance(v, Tensor)}
        shapes = (position.group, *((name, tensor.shape) for name, tensor in tensors.items()))
        if not self._outlive_the_job:
            if ready.device.type == "cuda":
                before_bytes = _allocated_bytes(ready.devices)
                graph = call()
                # Python may have freed a cycle of another origin meanwhile.
                return graph, max(0, _allocated_bytes(ready.devices) - before_bytes)
            if shapes in self._known:
                return call(), self._known[shapes]
        saved = SavedTensors(
            parameters=ready.parameter_storages,
            copied=ready.buffers.storages() if self._outlive_the_job else (),
        )
        try:
            with saved.hooks():
                graph = call()
        except ModelCallFailed:
            return None
        self._known[shapes] = saved.num_bytes
        return graph, saved.num_bytes


class SavedTensors:
    """Counts the tensors that one shard's graph saves."""

    def __init__(self, *, parameters: Collection[int], copied: Collection[int] = ()) -> None:
        self.num_bytes = 0
        self._copied = frozenset(copied)
        self._counted = set(parameters)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context in which the shard's forward pass runs."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Saved:
        # Without its place in the graph: a node that owned its own output would never be freed.
        tensor = tensor.detach()
        if without_numbers(tensor):  # of forward mode within the model: it has no storage
            return tensor, version_of(tensor)
        storages = storages_of([tensor])
        if is_plain(tensor) and self._copied and not self._copied.isdisjoint(storages):
            tensor = tensor.clone()
            self.num_bytes += tensor.nbytes
            return tensor, version_of(tensor)
        for address, storage in storages.items():
            if address not in self._counted:
                self._counted.add(address)
                self.num_bytes += storage.nbytes()
        return tensor, version_of(tensor)


def _allocated_bytes(devices: Iterable[torch.device]) -> int:
    return sum(torch.cuda.memory_allocated(device) for device in devices)


def _unpack(saved: Saved) -> Tensor:
    tensor, version = saved
    if version_of(tensor) != version:
        raise RuntimeError(
            "a tensor needed for the gradient was modified by an in-place operation: "
            f"{tuple(tensor.shape)} is at version {version_of(tensor)}, expected {version}"
        )
    return tensor
