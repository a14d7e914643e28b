"""The forms in which `inputs` may come, read into groups of named shards.

    [shard, shard, ...]                one group
    {"queries": [...], "passages": [...]}   several

where a shard is the arguments of one call of the model: {argument: tensor} (a tokenizer's
BatchEncoding is one), a bare tensor (the first argument) or a tuple (the first few). A position is
an argument named by a whole number, "0" the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gradbox.errors import InvalidInputs
from gradbox.protocol.spec_fields import IDENTIFIER
from gradbox.tensors.tensor_bytes import (
    TOKENISE,
    TensorBytes,
    is_tensor,
    tensor_bytes,
    what_came,
)

ARGUMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|0|[1-9][0-9]{0,2}")
UNNAMED: Final = "z"

Shard = Mapping[str, TensorBytes]


@dataclass(frozen=True, eq=False)
class ShardGroup:
    """Shards that go through one entry point of the model, under the name the loss knows.

    `streams` are the numbers that each shard's random stream is derived from; None leaves them to
    the places of group and shard.
    """

    name: str
    shards: tuple[Shard, ...]
    method: str
    order: TensorBytes | None = None
    streams: tuple[tuple[int, int], ...] | None = None


def read_groups(
    inputs: Any, *, method: str | Mapping[str, str], order: Any = None
) -> tuple[ShardGroup, ...]:
    """Read `inputs` in any of its forms.

    Raises:
        InvalidInputs: no shard, something that is not a tensor, or shards of one group that name
            different arguments.
    """
    if is_tensor(inputs):
        raise InvalidInputs(
            "inputs: expected a list of shards, got one tensor; "
            "write [tensor] for one shard, or tensor.split(16) for shards of 16 samples"
        )
    if isinstance(inputs, Mapping):
        named = _named_groups(inputs)
    else:
        named = {UNNAMED: _listed(inputs, where="inputs")}
    methods = _methods(method, tuple(named))
    orders = _orders(order, tuple(named))
    return tuple(
        ShardGroup(
            name=name,
            shards=_shards(name, shards),
            method=methods[name],
            order=orders.get(name),
        )
        for name, shards in named.items()
    )


def _named_groups(inputs: Mapping[Any, Any]) -> dict[str, list[Any]]:
    if not inputs:
        raise InvalidInputs("inputs: expected at least one group of shards, got an empty dict")
    if any(is_tensor(value) for value in inputs.values()):
        raise InvalidInputs(
            "inputs: expected a list of shards or {group: list of shards}, got one shard's "
            f"arguments {_names(inputs)}; write [shard] for a single shard"
        )
    groups = {}
    for name, shards in inputs.items():
        if not isinstance(name, str) or IDENTIFIER.fullmatch(name) is None:
            raise InvalidInputs(
                f"inputs: expected group names that can be arguments of the loss, up to "
                f"100 of a-z, A-Z, 0-9 and _, got {name!r:.120}"
            )
        groups[name] = _listed(shards, where=f"group {name!r}")
    return groups


def _listed(shards: Any, *, where: str) -> list[Any]:
    if isinstance(shards, str | bytes | Mapping) or not isinstance(shards, Iterable):
        is_text = isinstance(shards, str)
        advice = (
            TOKENISE if is_text else "a shard is {argument: tensor}, a tensor or a tuple of them"
        )
        raise InvalidInputs(
            f"{where}: expected a list of shards, got {type(shards).__name__}; {advice}"
        )
    listed = list(shards)
    if not listed:
        raise InvalidInputs(f"{where}: expected at least one shard, got an empty list")
    return listed


def _methods(method: str | Mapping[str, str], groups: tuple[str, ...]) -> dict[str, str]:
    if isinstance(method, str):
        return dict.fromkeys(groups, method)
    if not isinstance(method, Mapping):
        raise InvalidInputs(
            f"method: expected the name of an entry point, or {{group: name}}, got {method!r}"
        )
    unknown = sorted(map(str, set(method) - set(groups)))
    if unknown:
        raise InvalidInputs(
            f"method: expected entry points for the groups {_names(groups)}, got one for {unknown}"
        )
    return {name: method.get(name, "forward") for name in groups}


def _orders(order: Any, groups: tuple[str, ...]) -> dict[str, TensorBytes]:
    if order is None:
        return {}
    named = order if isinstance(order, Mapping) else {groups[0]: order}
    if not isinstance(order, Mapping) and len(groups) > 1:
        raise InvalidInputs(
            f"order: expected {{group: permutation}} for the groups {_names(groups)}, got one "
            f"permutation for all"
        )
    unknown = sorted(map(str, set(named) - set(groups)))
    if unknown:
        raise InvalidInputs(
            f"order: expected permutations for the groups {_names(groups)}, got one for {unknown}"
        )
    return {name: _order(name, value) for name, value in named.items() if value is not None}


def _order(group: str, order: Any) -> TensorBytes:
    """Read a permutation: whole numbers, in a tensor or in a list."""
    where = f"order of group {group!r}"
    if is_tensor(order):
        return tensor_bytes(order, where=where)
    try:
        array = np.asarray(order)
    except ValueError:  # of rows of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "iu" and array.size:
        raise InvalidInputs(f"{where}: expected whole numbers, got {str(order)[:60]}")
    return tensor_bytes(array.astype(np.int64), where=where)


def _shards(group: str, shards: list[Any]) -> tuple[Shard, ...]:
    read: list[Shard] = []
    for index, shard in enumerate(shards):
        where = f"shard {index} of group {group!r}"
        arguments = read_shard(shard, where=where)
        if read and set(arguments) != set(read[0]):
            raise InvalidInputs(
                f"{where} has arguments {_names(arguments)}, expected {_names(read[0])} like "
                f"shard 0; give every shard of a group the same arguments"
            )
        read.append(arguments)
    return tuple(read)


def read_shard(shard: Any, *, where: str) -> Shard:
    """Read the arguments of one call in any of their forms.

    Raises:
        InvalidInputs: there is none, or something that is not a tensor.
    """
    if is_tensor(shard):
        named: Mapping[Any, Any] = {"0": shard}
    elif isinstance(shard, tuple | list):
        named = {str(position): value for position, value in enumerate(shard)}
    elif isinstance(shard, Mapping):
        named = shard
    else:
        raise InvalidInputs(
            f"{where}: expected {{argument: tensor}}, a tensor or a tuple of tensors, "
            f"got {what_came(shard)}"
        )
    if not named:
        raise InvalidInputs(f"{where}: expected at least one argument, got none")
    for name in named:
        if not isinstance(name, str) or not ARGUMENT.fullmatch(name):
            raise InvalidInputs(
                f"{where}: expected names of the model's arguments (or positions '0', '1', …), "
                f"got {name!r}"
            )
    return {
        name: tensor_bytes(value, where=f"{where}, argument {name!r}")
        for name, value in named.items()
    }


def _names(names: Iterable[Any]) -> list[str]:
    return sorted(str(name) for name in names)


def natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts shard2 before shard10, as a key."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
