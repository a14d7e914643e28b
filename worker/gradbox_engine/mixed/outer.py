"""t = outer(dfdz, x) and its derivatives: the only step that sees the dfdz of all shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradbox_engine.model.calling.outputs import BARE, Outputs
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.replay.cotangents import differentiate, nonzero
from gradbox_engine.replay.z import ShardRows
from gradbox_engine.requests import SOLE_GROUP, CallOptions, Group, Objective


@dataclass(frozen=True)
class OuterDifferentiated:
    """t and its derivatives: by y directly, and u = ∂t/∂dfdz by shard where it is not zero."""

    value: float
    direct: dict[str, Tensor]  # without what outer itself does not reach
    directions: dict[Position, Tensor]  # views of the next
    whole_directions: Tensor | None  # u of all shards in their order
    dfdz: Tensor


def outer_at(
    dfdz: Mapping[str, Outputs],
    group: Group,
    rows: ShardRows,
    outer: Objective,
    *,
    options: CallOptions,
    device: torch.device,
) -> OuterDifferentiated:
    """Evaluate t at dfdz of all shards and differentiate it there.

    Args:
        dfdz: by the group's name, in the order of the shards.
    """
    unnamed = replace(group, name=SOLE_GROUP)  # outer is not told what the group is called
    derivatives = differentiate(
        outer,
        {SOLE_GROUP: dfdz[group.name]},
        [unnamed],
        device=device,
        seed=options.seed,
        widened=options.widened,
        called="outer",
    )
    seen = derivatives.seen[SOLE_GROUP]
    assert isinstance(seen, Tensor)
    cotangents = derivatives.cotangents[SOLE_GROUP]
    directions = nonzero(rows.parts({group.name: cotangents}))
    return OuterDifferentiated(
        value=derivatives.loss,
        direct={n: g for n, g in derivatives.parameters.items() if n not in derivatives.unreached},
        directions={position: part[BARE] for position, part in directions.items()},
        whole_directions=cotangents[BARE],
        dfdz=seen,
    )
