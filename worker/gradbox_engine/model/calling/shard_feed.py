"""Reads shards and copies them to the model's device.

On CUDA the next shard is read, pinned and copied on a stream of its own while the kernels of the
current one run; nothing waits on the host. The model always gets copies of the shards' tensors, for
it may write to its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradbox_engine.errors import BadInputs
from gradbox_engine.model.weights import wide_dtype
from gradbox_engine.requests import Group, Shard
from gradbox_engine.torch_private import tree_leaves, tree_map


class Position(NamedTuple):
    """Which shard of which group, both counted from 0."""

    group: int
    shard: int


def all_positions(groups: Sequence[Group]) -> list[Position]:
    """Return where every shard is, in the order in which they pass through the model."""
    return [
        Position(index, shard)
        for index, group in enumerate(groups)
        for shard in range(len(group.shards))
    ]


def shard_name(groups: Sequence[Group], position: Position) -> str:
    """Return how a message calls a shard."""
    return f"group {groups[position.group].name!r}, shard {position.shard}"


class ShardFeed:
    """Hands out the arguments of shards on the model's device."""

    def __init__(self, groups: Sequence[Group], device: torch.device, *, widened: bool) -> None:
        """Take the groups.

        Args:
            widened: whether floating-point arguments become float64.

        Raises:
            BadInputs: there is no group, or one without shards, or two of the same name.
        """
        names = [group.name for group in groups]
        if not groups or len(set(names)) != len(names):
            raise BadInputs(f"groups: expected one or more with different names, got {names}")
        for group in groups:
            if len(group.shards) == 0:
                raise BadInputs(f"group {group.name!r}: expected one shard or more, got none")
        self._groups = groups
        self._device = device
        self._widened = widened
        self._arguments: dict[int, frozenset[str]] = {}
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._next: tuple[Position, dict[str, Any]] | None = None

    def take(self, position: Position) -> dict[str, Any]:
        """Return the arguments of a shard by name; each call gives fresh tensors."""
        if self._next is not None and self._next[0] == position:
            arguments = self._next[1]
            self._next = None
        else:
            arguments = self._load(position)
        return self._arrived(arguments)

    def copied(self, part: Shard) -> dict[str, Any]:
        """Return copies of a shard, or of some of its samples, as `take` does."""
        return self._arrived(self._moved(part))

    def prefetch(self, position: Position | None) -> None:
        """Begin to bring a shard to the device, where that can go on beside other work."""
        if self._copies is None or position is None:
            return
        if self._next is None or self._next[0] != position:
            self._next = None
            # Without room beside the graphs, `take` loads it, where they can be freed.
            with suppress(torch.OutOfMemoryError):
                self._next = (position, self._load(position))

    def _load(self, position: Position) -> dict[str, Any]:
        shard = self._groups[position.group].shards[position.shard]
        self._check_names(position, shard)
        return self._moved(shard)

    def _moved(self, shard: Shard) -> dict[str, Any]:
        return {
            name: self._move(value) if isinstance(value, Tensor) else tree_map(self._move, value)
            for name, value in shard.items()
        }

    def _arrived(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return arguments that the kernels of the current stream wait for."""
        if self._copies is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._copies)
            for value in tree_leaves(arguments):
                if isinstance(value, Tensor):
                    value.record_stream(current)
        return arguments

    def _move(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        dtype = wide_dtype(value.dtype) if self._widened else value.dtype
        value = value.detach()
        if self._copies is None or value.device.type != "cpu":
            return value.to(self._device, dtype, copy=True)
        with torch.cuda.stream(self._copies):
            return value.pin_memory().to(self._device, dtype, copy=True, non_blocking=True)

    def _check_names(self, position: Position, shard: Shard) -> None:
        expected = self._arguments.get(position.group)
        names = frozenset(shard)
        if names == expected:
            return
        where = shard_name(self._groups, position)
        if expected is not None:
            raise BadInputs(
                f"{where}: expected the arguments of the shards before, {sorted(expected)}, got "
                f"{sorted(names)}; every shard of a group has the same"
            )
        places = sorted(int(name) for name in names if name.isdigit())
        if places != list(range(len(places))):
            raise BadInputs(
                f"{where}: expected positions counted from 0 without gaps, got {places}"
            )
        self._arguments[position.group] = names


def permutation(order: Sequence[int] | Tensor, num_rows: int, *, group: str) -> Tensor:
    """Return `order` as an int64 tensor of shape (N,).

    Raises:
        BadInputs: it is not a permutation of 0 … N−1.
    """
    given_N = torch.as_tensor(order).cpu()
    index_N = given_N.to(torch.int64)
    if not torch.equal(index_N.to(given_N.dtype), given_N):
        raise BadInputs(
            f"group {group!r}: expected order to be whole numbers, got {given_N.dtype} with "
            f"fractions; give it as integers"
        )
    if not torch.equal(index_N.sort().values, torch.arange(num_rows)):
        raise BadInputs(
            f"group {group!r}: expected order to be a permutation of {num_rows} samples, got "
            f"shape {tuple(index_N.shape)} with {len(set(index_N.flatten().tolist()))} different "
            f"entries; each of 0 to {num_rows - 1} belongs in it once"
        )
    return index_N


def call_arguments(arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Split arguments into those by position, whose names are whole numbers, and those by name."""
    places = sorted((name for name in arguments if name.isdigit()), key=int)
    named = {name: value for name, value in arguments.items() if not name.isdigit()}
    return [arguments[name] for name in places], named
