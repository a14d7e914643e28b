"""A model's buffers through a job: batch-norm statistics, moving averages, power iterations.

Before each shard of the first pass the buffers' values are kept; before a replay they are put back.
Two snapshots share what did not change between them. Change is told by value: writes through
`.data` leave no trace in a tensor's version counter.

A model may write into a buffer or rebind its name to a new tensor. After each shard the registered
tensor is put back under its name with the new value, so the tensor that the model made, which a
kept graph may hold, is never written to again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gradbox_engine.arrivals import Arrival
from gradbox_engine.errors import GraphInBuffer

Slot = tuple[str, str]
"""A submodule's name and the buffer's name in it."""


class Snapshot:
    """The values of all buffers at one moment. Nothing writes to these tensors."""

    def __init__(self, values: dict[Slot, Tensor | None]) -> None:
        self.values = values
        self._previous: Snapshot | None = None
        self._compared: list[Slot] = []
        self._changed: Arrival | None = None

    def compare_later(self, previous: Snapshot, slots: list[Slot]) -> None:
        """Begin to find out on the device which of `slots` are as they were in `previous`."""
        flags = [_differs(self.values[slot], previous.values[slot]) for slot in slots]
        self._previous, self._compared = previous, slots
        self._changed = Arrival(torch.stack(flags))

    def share(self) -> None:
        """Let go of what is the same as in the snapshot before, once that is known."""
        if self._changed is None or self._previous is None:
            return
        for slot, changed in zip(self._compared, self._changed.value().tolist(), strict=True):
            if not changed:
                self.values[slot] = self._previous.values[slot]
        self._previous = self._changed = None


class Buffers:
    """The live buffers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._tables = [(prefix, module._buffers) for prefix, module in self._modules.items()]
        self._registered = dict(self._live())
        self.first = self.take(None)

    def take(self, previous: Snapshot | None) -> Snapshot:
        """Return the buffers' values now, sharing with `previous` what did not change."""
        if previous is not None:
            previous.share()
        values: dict[Slot, Tensor | None] = {}
        compare: list[Slot] = []
        for slot, live in self._live():
            before = previous.values.get(slot) if previous is not None else None
            if live is None:
                values[slot] = None
            elif before is not None and _same_form(live, before):
                on_host = live.device.type == "cpu"
                values[slot] = before if on_host and torch.equal(live, before) else _copy(live)
                if not on_host:
                    compare.append(slot)
            else:
                values[slot] = _copy(live)
        snapshot = Snapshot(values)
        if previous is not None and compare:
            snapshot.compare_later(previous, compare)
        return snapshot

    def advance(self, previous: Snapshot) -> Snapshot:
        """Return the values after a shard, and put the registered tensors back under their names.

        Raises:
            GraphInBuffer: a buffer now carries a graph from this shard into the next.
        """
        for (module, name), live in self._live():
            if live is not None and live.requires_grad:
                raise GraphInBuffer(
                    f"buffer {_join(module, name)!r}: expected a value without a graph after a "
                    f"shard, got one that requires grad, so gradients would cross from shard to "
                    f"shard; update it under torch.no_grad() or from detached tensors"
                )
        snapshot = self.take(previous)
        if any(self._registered.get(slot) is not live for slot, live in self._live()):
            self.restore(snapshot)
        return snapshot

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Give every buffer the value it had when `snapshot` was taken."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for module, name in [slot for slot, _ in self._live() if slot not in snapshot.values]:
            delattr(self._modules[module], name)
        for (module, name), value in snapshot.values.items():
            slots = self._modules[module]._buffers
            registered = self._registered.get((module, name))
            if value is None:
                slots[name] = None
            elif registered is not None and _same_form(registered, value):
                slots[name] = registered
                targets.append(registered.detach())
                sources.append(value)
            else:
                slots[name] = _copy(value)
        if targets:
            torch._foreach_copy_(targets, sources)

    def storages(self) -> set[int]:
        """Return the addresses of the storages that the live buffers use."""
        return {live.untyped_storage().data_ptr() for _, live in self._live() if live is not None}

    def named(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """Return copies of a snapshot's values by the names `named_buffers` gives them."""
        return {
            _join(module, name): _copy(value)
            for (module, name), value in snapshot.values.items()
            if value is not None
        }

    def _live(self) -> Iterator[tuple[Slot, Tensor | None]]:
        for prefix, table in self._tables:
            for name, buffer in list(table.items()) if table else ():
                yield (prefix, name), buffer


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _same_form(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _differs(a: Tensor | None, b: Tensor | None) -> Tensor:
    assert a is not None
    assert b is not None
    return (a != b).any()


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
