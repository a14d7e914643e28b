"""Z out of the ranges' parts, and the ranges' parts of ∂L/∂Z."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradbox_engine.model.outputs import Outputs
from gradbox_engine.model.shard_feed import all_positions
from gradbox_engine.ranges import norm_statistics
from gradbox_engine.ranges.protocol import Range, RangeCotangents, RangeOutputs
from gradbox_engine.replay.cotangents import nonzero
from gradbox_engine.replay.z import NumRows, ShardRows, check_alike
from gradbox_engine.requests import Group

Whole = Mapping[str, Mapping[str, Tensor | None]]
"""Tensors shaped like Z in the order of the shards, by group and name."""


def joined(
    groups: Sequence[Group], gathered: Sequence[RangeOutputs], *, device: torch.device
) -> dict[str, Outputs]:
    """Return Z of each group, in the order of the shards.

    Raises:
        BadOutput: shards of one group differ in names, dtypes or trailing dimensions.
    """
    whole: dict[str, Outputs] = {}
    for group in groups:
        having = [outputs for outputs in gathered if group.name in outputs.outputs]
        named = [outputs.outputs[group.name] for outputs in having]
        shard = 0
        for outputs, part in zip(having, named, strict=True):
            check_alike(group.name, shard, part, named[0])
            shard += len(outputs.rows[group.name])
        whole[group.name] = {
            name: _cat([part[name] for part in named]).to(device) for name in named[0]
        }
    return whole


def range_cotangents(
    groups: Sequence[Group],
    parts: Sequence[Range],
    gathered: Sequence[RangeOutputs],
    cotangents: Whole,
    *,
    penalised: bool,
) -> list[RangeCotangents]:
    """Return what each range needs for its replay.

    Args:
        penalised: whether shards have penalties, so that all of them need a backward pass.
    """
    by_shard = ShardRows(groups, _num_rows(groups, gathered)).parts(cotangents)
    needed = by_shard if penalised else nonzero(by_shard)
    starts, _ = norm_statistics.composed([outputs.norms for outputs in gathered])
    positions = all_positions(groups)
    return [
        RangeCotangents(
            cotangents=given,
            needed=tuple(p for p in positions[part.start : part.stop] if p in needed),
            norms=norms,
        )
        for part, given, norms in zip(parts, _by_range(gathered, cotangents), starts, strict=True)
    ]


def _num_rows(groups: Sequence[Group], gathered: Sequence[RangeOutputs]) -> NumRows:
    return {
        group.name: [n for outputs in gathered for n in outputs.rows.get(group.name, ())]
        for group in groups
    }


def _by_range(gathered: Sequence[RangeOutputs], whole: Whole) -> list[dict[str, Outputs]]:
    begin = dict.fromkeys(whole, 0)
    found: list[dict[str, Outputs]] = []
    for outputs in gathered:
        part: dict[str, Outputs] = {}
        for group, rows in outputs.rows.items():
            end = begin[group] + sum(1 if number is None else number for number in rows)
            part[group] = {
                name: tensor[begin[group] : end].cpu()
                for name, tensor in whole[group].items()
                if tensor is not None
            }
            begin[group] = end
        found.append(part)
    return found


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
