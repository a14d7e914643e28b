"""A model's buffers through a job: batch-norm statistics, moving averages, power iterations.

One rule: S₀ … Sₙ, the buffers before the first shard and after each, are always kept. Sᵢ is
restored before a call on shard i, and Sᵢ₊₁ before the backward pass of a graph that was kept from
shard i, since a checkpointed block or a custom function may read buffers there. So a kept graph
and a replay see the same numbers, those that plain torch would show to one shard alone.

A model may write into a buffer, or bind its name to a new tensor. What is written into stays the
registered tensor: its numbers and its version counter are restored in place, so that views of it,
and graphs that saved it, find them. A name that the model binds anew gets a new tensor at every
restore, and none that was once bound is written to again, for a graph may have saved it.

A buffer may end a shard with a graph that the next one does not use: a spiking layer keeps its
state in one, and sets it anew at the beginning of each call. The graph is cut, and a zero that
requires grad is subtracted in its place: a gradient that reaches the zero would have passed from
one shard to the one before, and is refused.

All else that shards change, as a counter of calls, belongs to S₀ … Sₙ too: see `model_state`.

Change is told by value: writes through `.data`, and batch norm's own, leave no trace in a version
counter.

Cost: the changing buffers once a shard, packed into one flat tensor for each dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor, nn

from gradbox_engine.errors import GraphInBuffer
from gradbox_engine.model.state.model_state import AS_REGISTERED, ModelState
from gradbox_engine.model.state.snapshots import Live, PackedValues, Slot, Snapshot
from gradbox_engine.model.tensor_equality import form, same_values, storages_of, writable


class Buffers:
    """The live buffers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._buffer_tables = [(name, m._buffers) for name, m in self._modules.items()]
        self.beyond = ModelState(model)
        self._registered = self._live()  # the tensors that are bound when the job begins
        self._forms = {slot: form(b) for slot, b in self._registered.items() if b is not None}
        self._changing: set[Slot] = set()  # whose numbers a shard changed: packed in each S
        self._rebound: set[Slot] = set()  # whose name a shard bound anew
        self.first = self._take(self._registered, None, frozenset())
        self.outdates_older_graphs = False
        """Set by `advance` where a buffer that shards had written into was bound anew: graphs of
        the shards before the newest saved a tensor whose numbers are not restored any more."""

    def advance(self, previous: Snapshot) -> Snapshot:
        """Return the buffers after a shard, and make them ready for the next one.

        Args:
            previous: what this returned for the shard before.

        Raises:
            GraphInBuffer: a registered tensor was overwritten by one with a graph.
        """
        live = self._live()
        carrying = self._carrying(live)
        bound_anew = {s for s, b in live.items() if b is not self._registered.get(s)}
        self.outdates_older_graphs = bool((bound_anew - self._rebound) & self._changing)
        snapshot = self._take(live, previous, carrying)
        self._rebound |= bound_anew
        values = snapshot.values if bound_anew else {}
        for module, name in bound_anew:
            value = values[module, name]
            self._modules[module]._buffers[name] = None if value is None else _copy(value)
        self._cut_graphs(carrying)
        return snapshot

    def _carrying(self, live: Live) -> frozenset[Slot]:
        """Return which buffers carry a graph, or are another leaf than the registered one.

        A registered leaf that was only told to require grad carries none, and is told not to.
        """
        found = set()
        for slot, buffer in live.items():
            if buffer is None or not buffer.requires_grad:
                continue
            if buffer is not self._registered.get(slot) and buffer.layout is torch.strided:
                found.add(slot)
            elif buffer.is_leaf and not isinstance(buffer, nn.Parameter):
                buffer.requires_grad_(False)
            else:
                raise GraphInBuffer(
                    f"buffer {_join(*slot)!r}: expected a value without a graph after a shard, got "
                    f"one that requires grad, so gradients would cross from shard to shard; update "
                    f"it under torch.no_grad() or from detached tensors"
                )
        return frozenset(found)

    def _cut_graphs(self, slots: Iterable[Slot]) -> None:
        """Put a zero that no gradient may reach in the place of these buffers' graphs."""
        for module, name in slots:
            bound = self._modules[module]._buffers
            value = bound[name]
            assert value is not None
            zero = value.new_zeros(()).requires_grad_()
            zero.register_hook(partial(_refuse_crossing, _join(module, name)))
            with torch.enable_grad():
                bound[name] = value - zero  # which keeps the sign of a zero, too

    def restore(self, snapshot: Snapshot) -> None:
        """Give every buffer the value it had when `snapshot` was taken, and no graph."""
        if snapshot.beyond is not None:
            self.beyond.restore(snapshot.beyond)
        values, live = snapshot.values, self._live()
        if values or live:
            self._restore(values, live)
            self._restore_versions(snapshot)
            self._cut_graphs(snapshot.carrying)

    @contextmanager
    def left_out_undone(self) -> Iterator[None]:
        """Put what states leave out back to what it is now, on the way out, where order counts.

        No `restore` does, and the backward pass of a reentrant checkpoint calls the model again:
        the next shard would find what that left.
        """
        if not self.beyond.in_order:
            yield
            return
        now = ModelState(self._model)
        yield
        now.restore(AS_REGISTERED)

    @torch.no_grad()
    def _restore(self, values: Live, live: Live) -> None:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for buffer in live.values():
            if buffer is not None and buffer.requires_grad:
                buffer.detach_()
        for module, name in [slot for slot in live if slot not in values]:
            delattr(self._modules[module], name)
        for (module, name), value in values.items():
            bound, registered = self._modules[module]._buffers, self._registered.get((module, name))
            if value is None:
                bound[name] = None
            elif registered is None or not self._restorable((module, name), registered, value):
                bound[name] = _copy(value)
            else:
                bound[name] = registered
                if writable(registered):
                    targets.append(registered.data)  # of a version counter of its own
                    sources.append(value)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _restorable(self, slot: Slot, registered: Tensor, value: Tensor) -> bool:
        """Return whether the registered tensor can have the numbers of `value`, or has them."""
        if slot in self._rebound:
            return False
        if not writable(registered):
            return same_values(registered, value)
        return form(registered) == form(value)

    def _restore_versions(self, snapshot: Snapshot) -> None:
        """Let graphs that saved a registered tensor find the version that they saved.

        autograd takes a tensor for overwritten when its counter has moved on. Here the numbers
        were restored, so the counter is, too. A shard that overwrites in place what its own graph
        saved still fails, as in plain torch: its counter ends above the saved one. The function is
        private to torch, which uses it for the same purpose in FSDP; there is no public one.
        """
        held = [(self._registered[slot], number) for slot, number in snapshot.versions.items()]
        tensors = tuple(tensor for tensor, _ in held if tensor is not None)
        torch._C._autograd._unsafe_set_version_counter(tensors, tuple(number for _, number in held))

    def storages(self) -> set[int]:
        """Return the addresses of the storages that the live buffers use."""
        return set(storages_of(b for b in self._live().values() if b is not None))

    def named(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """Return copies of a snapshot's values by the names `named_buffers` gives them."""
        values = snapshot.values
        ordered = dict.fromkeys([*self._registered, *values])
        return {
            _join(*slot): _copy(value)
            for slot in ordered
            if (value := values.get(slot)) is not None
        }

    def _live(self) -> Live:
        return {
            (prefix, name): buffer
            for prefix, table in self._buffer_tables
            if table
            for name, buffer in table.items()
        }

    def _versions(self, live: Live) -> dict[Slot, int]:
        return {
            slot: buffer._version
            for slot, buffer in live.items()
            if buffer is not None
            and buffer is self._registered.get(slot)
            and not buffer.is_inference()
        }

    @torch.no_grad()
    def _take(self, live: Live, previous: Snapshot | None, carrying: frozenset[Slot]) -> Snapshot:
        """Return the live values, sharing with `previous` what did not change."""
        if previous is not None:
            self._changing.update(previous.share())
        apart: Live = {}
        together: dict[tuple[torch.dtype, torch.device], dict[Slot, Tensor]] = {}
        compare: list[Slot] = []
        for slot, buffer in live.items():
            before = None if previous is None else previous.apart(slot)
            if buffer is None:
                apart[slot] = None
            elif (
                slot in self._changing
                and self._forms.get(slot) == form(buffer)
                and buffer.layout is torch.strided
            ):
                together.setdefault((buffer.dtype, buffer.device), {})[slot] = buffer
            elif before is None or form(buffer) != form(before):
                apart[slot] = _copy(buffer)
            elif buffer.device.type != "cpu" and buffer.layout is torch.strided:
                apart[slot] = _copy(buffer)
                compare.append(slot)
            elif same_values(buffer, before):
                apart[slot] = before
            else:
                apart[slot] = _copy(buffer)
                self._changing.add(slot)
        packed = [PackedValues.of(alike) for alike in together.values()]
        snapshot = Snapshot(
            apart,
            packed,
            versions=self._versions(live),
            beyond=AS_REGISTERED if previous is None else self.beyond.state(),
            carrying=carrying,
        )
        if previous is not None and compare:
            snapshot.compare_later(previous, compare)
        return snapshot


def _refuse_crossing(name: str, _: Tensor) -> NoReturn:
    raise GraphInBuffer(
        f"buffer {name!r}: expected no gradient to pass from one shard to the one before, got one "
        f"through this buffer; update it under torch.no_grad() or from detached tensors, or set it "
        f"anew at the beginning of each call"
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
