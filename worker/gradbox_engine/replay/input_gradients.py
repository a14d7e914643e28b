"""∂L/∂x for arguments of the model, asked for as `inputs.NAME` or `inputs.GROUP.NAME`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.wrt import INPUTS
from gradbox_engine.requests import SOLE_GROUP, Group

InputGrads = dict[str, dict[str, tuple[Tensor, ...]]]


def collect(
    groups: Sequence[Group],
    wanted: Mapping[str, Sequence[str]],
    by_shard: Mapping[Position, Mapping[str, Tensor | None]],
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
                by_shard.get(Position(index, place), {}).get(name)
                for place in range(len(group.shards))
            ]
            if all(gradient is None for gradient in shards):
                unreached.append(INPUTS + _full_name(group.name, name))
            collected.setdefault(group.name, {})[name] = tuple(
                torch.zeros_like(group.shards[place][name], device=device) if g is None else g
                for place, g in enumerate(shards)
            )
    return collected, unreached


def _full_name(group: str, name: str) -> str:
    return name if group == SOLE_GROUP else f"{group}.{name}"
