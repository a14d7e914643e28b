"""A model's state through a job: S₀ … Sₙ, before the first shard and after each.

One rule: S₀ … Sₙ are always kept. Sᵢ is restored before a call on shard i, and Sᵢ₊₁ before the
backward pass of a graph that was kept from shard i, since a checkpointed block or a custom function
may read buffers there. So a kept graph and a replay see the same numbers, those that plain torch
would show to one shard alone.

A model may write into a buffer, or bind its name to a new tensor. What was registered stays the
same tensor: its numbers and its version counter are restored in place, so that views of it, and
graphs that saved it, find them; see `buffer_numbers`. What is bound anew, and all else that shards
change, as a counter of calls, is an entry like any other: see `model_state`.

A buffer may end a shard with a graph that the next one does not use: a spiking layer keeps its
state in one, and sets it anew at the beginning of each call. The graph is cut, and a zero that
requires grad is subtracted in its place: a gradient that reaches the zero would have passed from
one shard to the one before, and is refused.

A checkpoint has of each state the numbers that differ from those of the one before, and nothing of
the first, which is the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.errors import GraphInBuffer
from gradbox_engine.model.state.buffer_numbers import BufferNumbers, RegisteredBuffers
from gradbox_engine.model.state.model_state import AS_REGISTERED, ModelState, State
from gradbox_engine.model.tensor_equality import same_values, storages_of
from gradbox_engine.torch_private import buffers_of

Slot = tuple[str, str]
"""A submodule's name and the buffer's name in it."""

Live = dict[Slot, Tensor | None]


class AsRegistered(NamedTuple):
    """What a model was registered with."""

    state: ModelState
    buffers: RegisteredBuffers


class Snapshot:
    """A model's state at one moment.

    `numbers` are those of the registered buffers, `beyond` is what else differs from the registered
    model, None where that is to stay as it is; `carrying` are the buffers that had a graph then.
    """

    def __init__(
        self,
        registered: AsRegistered,
        numbers: BufferNumbers,
        beyond: State | None,
        carrying: frozenset[Slot] = frozenset(),
    ) -> None:
        self.numbers, self.beyond, self.carrying = numbers, beyond, carrying
        self.registered = registered

    @property
    def values(self) -> Live:
        """The values of all buffers by slot, those kept together as views."""
        numbers, indices = self.numbers.values, self.registered.buffers.indices
        bound = self.registered.state.bound(self.beyond or AS_REGISTERED)
        return {
            slot: numbers[indices[id(value)]] if id(value) in indices else value
            for slot, value in bound.items()
        }

    def with_values(self, values: Live) -> Snapshot:
        """Return one in which registered buffers have these values, and all else stays as it is."""
        indices = self.registered.buffers.indices
        bound = self.registered.state.bound(AS_REGISTERED)
        apart = {
            indices[id(buffer)]: value
            for slot, buffer in bound.items()
            if (value := values.get(slot)) is not None
        }
        return Snapshot(self.registered, BufferNumbers(apart, versions={}), None)

    def same_buffers(self, other: Snapshot) -> bool:
        """Return whether the values of all buffers are equal, NaN not; waits for the device."""
        own, others = self.values, other.values
        return own.keys() == others.keys() and all(
            a is b or (a is not None and b is not None and same_values(a, b))
            for a, b in ((own[slot], others[slot]) for slot in own)
        )


class Buffers:
    """The live buffers of a model, and all else that shards may change.

    Args:
        registered: the model's state now, for a walk takes as long as a small shard.
    """

    def __init__(self, model: nn.Module, registered: ModelState | None = None) -> None:
        self._model = model
        self.beyond = registered or ModelState(model)
        self._tables = {name: buffers_of(module) for name, module in self.beyond.modules}
        buffers = RegisteredBuffers(b for b in self._live().values() if b is not None)
        self._registered = AsRegistered(self.beyond, buffers)
        self.first = Snapshot(self._registered, buffers.first, AS_REGISTERED)

    def advance(self, previous: Snapshot) -> Snapshot:
        """Return the state after a shard, and make the model ready for the next one.

        Args:
            previous: what this returned for the shard before.

        Raises:
            GraphInBuffer: a registered tensor was overwritten by one with a graph.
        """
        carrying = self._carrying()
        numbers = self._registered.buffers.take(previous.numbers)
        beyond = self.beyond.state()
        self._cut_graphs(carrying)
        return Snapshot(self._registered, numbers, beyond, carrying)

    def _carrying(self) -> frozenset[Slot]:
        """Return which buffers carry a graph, or are another leaf than the registered one.

        A registered leaf that was only told to require grad carries none, and is told not to.
        """
        carrying = set()
        for slot, buffer in self._live().items():
            if buffer is None or not buffer.requires_grad:
                continue
            if (
                id(buffer) not in self._registered.buffers.indices
                and buffer.layout is torch.strided
            ):
                carrying.add(slot)
            elif buffer.is_leaf and not isinstance(buffer, nn.Parameter):
                buffer.requires_grad_(False)
            else:
                raise GraphInBuffer(
                    f"buffer {_join(*slot)!r}: expected a value without a graph after a shard, got "
                    f"one that requires grad, so gradients would cross from shard to shard; update "
                    f"it under torch.no_grad() or from detached tensors"
                )
        return frozenset(carrying)

    def _cut_graphs(self, slots: Iterable[Slot]) -> None:
        """Put a zero that no gradient may reach in the place of these buffers' graphs."""
        for module, name in slots:
            bound = self._tables[module]
            value = bound[name]
            assert value is not None
            value = value.detach()
            zero = value.new_zeros(()).requires_grad_()
            zero.register_hook(partial(_refuse_crossing, _join(module, name)))  # type: ignore[no-untyped-call]
            with torch.enable_grad():
                bound[name] = value - zero  # which keeps the sign of a zero, too

    def restore(self, snapshot: Snapshot) -> None:
        """Give the model the state it had when `snapshot` was taken, and its buffers no graph."""
        if snapshot.beyond is None:
            self.beyond.restore_buffers()
        else:
            self.beyond.restore(snapshot.beyond)
        self._registered.buffers.restore(snapshot.numbers)
        self._cut_graphs(snapshot.carrying)

    def left_out_undone(self) -> AbstractContextManager[None]:
        """Put what states leave out back to what it is now, on the way out, where order counts.

        No `restore` does, and the backward pass of a reentrant checkpoint calls the model again:
        the next shard would find what that left.
        """
        return self._undone() if self.beyond.in_order else nullcontext()

    @contextmanager
    def _undone(self) -> Iterator[None]:
        now = ModelState(self._model)
        yield
        now.restore(AS_REGISTERED)

    def storages(self) -> set[int]:
        """Return the addresses of the storages that the live buffers use."""
        return set(storages_of(b for b in self._live().values() if b is not None))

    def named(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """Return copies of a snapshot's values by the names `named_buffers` gives them."""
        values = snapshot.values
        ordered = dict.fromkeys([*self.beyond.bound(AS_REGISTERED), *values])
        return {
            _join(*slot): value.detach().clone()
            for slot in ordered
            if (value := values.get(slot)) is not None
        }

    def _live(self) -> Live:
        return {
            (prefix, name): buffer
            for prefix, table in self._tables.items()
            if table
            for name, buffer in table.items()
        }


def packed(states: Sequence[Snapshot]) -> Checkpoint:
    """Return what makes S₁ … Sₙ of S₀, of states that differ in the numbers of buffers alone."""
    tensors: dict[str, Tensor] = {}
    earlier = states[0].numbers.values
    for index, snapshot in enumerate(states[1:]):
        numbers = snapshot.numbers.values
        tensors |= {f"{index}/{i}": new for i, new in numbers.items() if new is not earlier[i]}
        earlier = numbers
    return Checkpoint(tensors, {"states": len(states) - 1})


def unpacked(checkpoint: Checkpoint, first: Snapshot) -> list[Snapshot]:
    """Return S₀ … Sₙ, S₀ being `first`."""
    states, numbers = [first], first.numbers.values
    changed: dict[int, dict[int, Tensor]] = {}
    for key, value in checkpoint.tensors.items():
        state, _, buffer = key.partition("/")
        changed.setdefault(int(state), {})[int(buffer)] = value
    for index in range(checkpoint.facts["states"]):
        numbers = numbers | changed.get(index, {})
        kept = BufferNumbers(numbers, versions={})
        states.append(Snapshot(first.registered, kept, AS_REGISTERED))
    return states


def _refuse_crossing(name: str, _: Tensor) -> NoReturn:
    raise GraphInBuffer(
        f"buffer {name!r}: expected no gradient to pass from one shard to the one before, got one "
        f"through this buffer; update it under torch.no_grad() or from detached tensors, or set it "
        f"anew at the beginning of each call"
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
