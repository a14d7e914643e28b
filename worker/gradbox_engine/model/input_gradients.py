"""∂L/∂x for arguments of the model, asked for as `inputs.NAME` or `inputs.GROUP.NAME`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from gradbox_engine.errors import UnknownParameter
from gradbox_engine.model.shard_feed import Position
from gradbox_engine.model.wrt import INPUTS
from gradbox_engine.replay.cotangents import SOLE_GROUP
from gradbox_engine.requests import Group

InputGrads = dict[str, dict[str, tuple[Tensor, ...]]]


def matched_inputs(groups: Sequence[Group], patterns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return which arguments of which group the patterns name, as the first shards tell.

    Raises:
        UnknownParameter: a pattern matches no floating-point argument.
    """
    if not patterns:
        return {group.name: () for group in groups}
    known = {
        group.name: [
            name
            for name, value in group.shards[0].items()
            if isinstance(value, Tensor) and value.is_floating_point()
        ]
        for group in groups
    }
    for pattern in patterns:
        if not any(_matches(g, name, [pattern]) for g, names in known.items() for name in names):
            raise UnknownParameter(
                f"wrt: expected {INPUTS + pattern!r} to match a floating-point argument, got none; "
                f"there are {known}"
            )
    return {g: tuple(n for n in names if _matches(g, n, patterns)) for g, names in known.items()}


def collect(
    groups: Sequence[Group],
    wanted: Mapping[str, Sequence[str]],
    found: Mapping[Position, Mapping[str, Tensor | None]],
    *,
    device: torch.device,
) -> tuple[InputGrads, list[str]]:
    """Return the gradients by group, argument and shard, and the names that nothing reached.

    A shard that the loss does not depend on, or that had a cotangent of zero, has zeros.
    """
    collected: InputGrads = {}
    unreached: list[str] = []
    for index, group in enumerate(groups):
        for name in wanted[group.name]:
            shards = [
                found.get(Position(index, place), {}).get(name)
                for place in range(len(group.shards))
            ]
            if all(gradient is None for gradient in shards):
                unreached.append(INPUTS + _full_name(group.name, name))
            collected.setdefault(group.name, {})[name] = tuple(
                torch.zeros_like(group.shards[place][name], device=device) if g is None else g
                for place, g in enumerate(shards)
            )
    return collected, unreached


def _matches(group: str, name: str, patterns: Sequence[str]) -> bool:
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(f"{group}.{name}", pattern)
        for pattern in patterns
    )


def _full_name(group: str, name: str) -> str:
    return name if group == SOLE_GROUP else f"{group}.{name}"
