"""A model's buffers through a job: batch-norm statistics, moving averages, power iterations.

Before each shard of the first pass the buffers' values are kept; before a replay they are put back.
On a CPU, where equality is told at once, neither is done for as long as nothing changes but the
statistics of batch norms in train mode, which those do not read: see `beginnings`.

Change is told by value: writes through `.data` leave no trace in a tensor's version counter.

A model may write into a buffer or rebind its name to a new tensor. After each shard the registered
tensor is put back under its name with the new value, so the tensor that the model made, which a
kept graph may hold, is never written to again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradbox_engine.errors import GraphInBuffer
from gradbox_engine.model.flat import Layout, flattened
from gradbox_engine.model.snapshots import Live, Packed, Slot, Snapshot
from gradbox_engine.model.tensor_equality import form, same_values, strided_parts, writable

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

Kind = tuple[torch.dtype, torch.device]

Statistics = tuple[Tensor, ...]
"""Statistics of all batch norms in train mode at one moment, one flat tensor for each kind."""


class OfKind:
    """Live buffers of one kind, and a flat tensor through which all of them get values."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors
        self.flat = flattened(tensors)
        self.parts = Layout.of(tensors).parts(self.flat)


class Buffers:
    """The live buffers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._tables = [(prefix, module._buffers) for prefix, module in self._modules.items()]
        self._changing: set[Slot] = set()
        self._others_change = False
        self._layouts: dict[Kind, tuple[tuple[Slot, ...], Layout]] = {}
        self._registered = self._live()
        self._of_batch_norms = frozenset(
            (module, name)
            for module, name in self._registered
            if _is_statistic(self._modules[module], name)
        )
        self._on_cpu = all(b is None or b.device.type == "cpu" for b in self._registered.values())
        self._forms = {slot: form(b) for slot, b in self._registered.items() if b is not None}
        self.first = self.take(None)
        self._constant = [
            (
                self._modules[slot[0]]._buffers,
                slot[1],
                buffer,
                None if slot in self._of_batch_norms else self.first.apart(slot),
            )
            for slot, buffer in self._registered.items()
        ]
        self._versions = [
            (buffer, buffer._version)
            for slot, buffer in self._registered.items()
            if buffer is not None and slot not in self._of_batch_norms and not buffer.is_inference()
        ]
        self._statistics = _by_kind(
            buffer
            for slot, buffer in self._registered.items()
            if buffer is not None and slot in self._of_batch_norms
        )

    @property
    def has_statistics(self) -> bool:
        """Whether there are statistics of batch norms in train mode."""
        return bool(self._statistics)

    def statistics(self) -> Statistics:
        """Return the statistics as they are now."""
        return tuple(flattened(kind.tensors) for kind in self._statistics)

    def put_statistics(self, values: Statistics) -> None:
        """Give the statistics these values, unseen by graphs that saved them."""
        for kind, flat in zip(self._statistics, values, strict=True):
            kind.flat.copy_(flat)
            torch._foreach_copy_([buffer.data for buffer in kind.tensors], kind.parts)

    def take(self, previous: Snapshot | None) -> Snapshot:
        """Return the buffers' values now, sharing with `previous` what did not change."""
        return self._take(self._live(), previous)

    def advance(self, previous: Snapshot) -> Snapshot:
        """Return the values after a shard, and put the registered tensors back under their names.

        Raises:
            GraphInBuffer: a buffer now carries a graph from this shard into the next.
        """
        live = self._live()
        for (module, name), buffer in live.items():
            if buffer is not None and buffer.requires_grad:
                raise GraphInBuffer(
                    f"buffer {_join(module, name)!r}: expected a value without a graph after a "
                    f"shard, got one that requires grad, so gradients would cross from shard to "
                    f"shard; update it under torch.no_grad() or from detached tensors"
                )
        snapshot = self._take(live, previous)
        if self._rewritten():
            self._others_change = True
        if any(self._registered.get(slot) is not buffer for slot, buffer in live.items()):
            self._others_change = True
            self.restore(snapshot)
        return snapshot

    def carry_graphs(self) -> bool:
        """Return whether a buffer holds a graph of the shard that went last."""
        return any(
            buffer is not None and buffer.requires_grad
            for _, table in self._tables
            for buffer in table.values()
        )

    def settled(self) -> bool:
        """Return whether a shard has left all buffers alone but statistics of batch norms.

        False, too, where that is not known yet, and ever after: `advance` has to look.
        """
        if self._others_change or not self._on_cpu:
            return False
        if sum(len(table) for _, table in self._tables) != len(self._constant):
            return False
        if self._rewritten():
            return False
        return all(
            table.get(name) is buffer
            and (buffer is None or not buffer.requires_grad)
            and (value is None or same_values(value, buffer))
            for table, name, buffer, value in self._constant
        )

    def _rewritten(self) -> bool:
        """Return whether something was written in place to a buffer that is no statistic.

        Be it the same numbers: a graph that saved the buffer itself is of no use then.
        """
        return any(buffer._version != version for buffer, version in self._versions)

    def others_change(self, latest: Snapshot | None = None) -> bool:
        """Return whether anything changes from shard to shard but statistics of batch norms.

        Args:
            latest: what the snapshot knows of the last change is waited for; without it what has
                come is looked at.
        """
        if latest is not None:
            self._note(latest.share())
        return self._others_change

    def _note(self, changed: Iterable[Slot]) -> None:
        for slot in changed:
            self._changing.add(slot)
            self._others_change |= slot not in self._of_batch_norms

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Give every buffer the value it had when `snapshot` was taken."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        values = snapshot.values
        for module, name in [slot for slot in self._live() if slot not in values]:
            delattr(self._modules[module], name)
        for (module, name), value in values.items():
            slots = self._modules[module]._buffers
            registered = self._registered.get((module, name))
            if value is None:
                slots[name] = None
            elif registered is not None and not writable(registered):
                same = same_values(registered, value)
                slots[name] = registered if same else _copy(value)
            elif registered is not None and form(registered) == form(value):
                slots[name] = registered
                targets.append(registered.data)  # no graph that is still there reads the old values
                sources.append(value)
            else:
                slots[name] = _copy(value)
        if targets:
            torch._foreach_copy_(targets, sources)

    def storages(self, *, statistics: bool = True) -> set[int]:
        """Return the addresses of the storages that the live buffers use.

        Args:
            statistics: whether to count those of batch norms in train mode.
        """
        left_out = () if statistics else self._statistics
        apart = {id(buffer) for kind in left_out for buffer in kind.tensors}
        return {
            part.untyped_storage().data_ptr()
            for buffer in self._live().values()
            if buffer is not None and id(buffer) not in apart
            for part in strided_parts(buffer)
        }

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
            for prefix, table in self._tables
            if table
            for name, buffer in table.items()
        }

    @torch.no_grad()
    def _take(self, live: Live, previous: Snapshot | None) -> Snapshot:
        if previous is not None:
            self._note(previous.share())
        apart: Live = {}
        together: dict[Kind, dict[Slot, Tensor]] = {}
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
                self._others_change |= previous is not None
            elif buffer.device.type != "cpu" and buffer.layout is torch.strided:
                apart[slot] = _copy(buffer)
                compare.append(slot)
            elif same_values(buffer, before):
                apart[slot] = before
            else:
                apart[slot] = _copy(buffer)
                self._note([slot])
        packed = [self._pack(kind, members) for kind, members in together.items()]
        snapshot = Snapshot(apart, packed)
        if previous is not None and compare:
            snapshot.compare_later(previous, compare)
        return snapshot

    def _pack(self, kind: Kind, members: Mapping[Slot, Tensor]) -> Packed:
        slots, values = tuple(members), tuple(members.values())
        if kind not in self._layouts or self._layouts[kind][0] != slots:
            self._layouts[kind] = slots, Layout.of(values)
        return Packed(*self._layouts[kind], flattened(values))


def _is_statistic(module: nn.Module, name: str) -> bool:
    own = isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward
    return own and module.training and name in STATISTICS


def _by_kind(tensors: Iterable[Tensor]) -> list[OfKind]:
    groups: dict[Kind, dict[int, Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), {})[id(tensor)] = tensor
    return [OfKind(tuple(group.values())) for group in groups.values()]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
