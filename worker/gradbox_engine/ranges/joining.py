"""Z out of the ranges' parts, and the ranges' parts of ∂L/∂Z."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.calling.shard_feed import Position, all_positions, shard_name
from gradbox_engine.model.comparison import ReplayComparison
from gradbox_engine.ranges import norm_statistics
from gradbox_engine.ranges.protocol import (
    EarlierOutputs,
    NormUpdate,
    Range,
    RangeCotangents,
    RangeOutputs,
)
from gradbox_engine.replay.z import NumRows, ShardRows, check_alike, moved_into_one
from gradbox_engine.requests import Group

Whole = Mapping[str, Mapping[str, Tensor | None]]
"""Tensors shaped like Z in the order of the shards, by group and name."""

RangeRows = Mapping[str, tuple[int | None, ...]]
"""Each shard's number of rows in Z, by group, of one range."""


def joined(
    groups: Sequence[Group], gathered: Sequence[RangeOutputs], *, device: torch.device
) -> dict[str, Outputs]:
    """Return Z of each group, in the order of the shards.

    Args:
        gathered: views of Z take the place of its parts one after the other, so that Z and all of
            them are never in the host's memory together.

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
            name: moved_into_one(named, name, [len(part[name]) for part in named]).to(device)
            for name in list(named[0])
        }
    return whole


def range_cotangents(
    groups: Sequence[Group],
    parts: Sequence[Range],
    rows: Sequence[RangeRows],
    cotangents: Whole,
    needed: Container[Position],
    *,
    norms: Sequence[Mapping[str, NormUpdate]],
) -> list[RangeCotangents]:
    """Return what each range needs for its replay.

    Args:
        rows: of each range.
        cotangents: in the order of the shards.
        needed: shards that need a backward pass.
        norms: each range's updates of running statistics.
    """
    starts, _ = norm_statistics.composed(norms)
    positions = all_positions(groups)
    return [
        RangeCotangents(
            cotangents=given,
            needed=tuple(p for p in positions[part.start : part.stop] if p in needed),
            norms=start,
        )
        for part, given, start in zip(parts, by_range(rows, cotangents), starts, strict=True)
    ]


def joined_rows(groups: Sequence[Group], rows: Sequence[RangeRows]) -> NumRows:
    """Return each shard's number of rows in Z."""
    return {
        group.name: [n for of_range in rows for n in of_range.get(group.name, ())]
        for group in groups
    }


def rows_by_range(
    groups: Sequence[Group], parts: Sequence[Range], num_rows: NumRows
) -> list[dict[str, tuple[int | None, ...]]]:
    """Return each range's part of the shards' numbers of rows; `joined_rows` backwards."""
    positions = all_positions(groups)
    by_part: list[dict[str, list[int | None]]] = [{} for _ in parts]
    for part, rows in zip(parts, by_part, strict=True):
        for group, shard in positions[part.start : part.stop]:
            name = groups[group].name
            rows.setdefault(name, []).append(num_rows[name][shard])
    return [{name: tuple(numbers) for name, numbers in rows.items()} for rows in by_part]


def by_range(rows: Sequence[RangeRows], whole: Whole) -> list[dict[str, Outputs]]:
    """Return each range's rows of tensors shaped like Z."""
    begin = dict.fromkeys(whole, 0)
    parts: list[dict[str, Outputs]] = []
    for of_range in rows:
        part: dict[str, Outputs] = {}
        for group in (name for name in of_range if name in whole):
            end = begin[group] + sum(1 if n is None else n for n in of_range[group])
            part[group] = {
                name: tensor[begin[group] : end]
                for name, tensor in whole[group].items()
                if tensor is not None
            }
            begin[group] = end
        parts.append(part)
    return parts


def compare(
    comparison: ReplayComparison,
    groups: Sequence[Group],
    part: Range,
    again: RangeOutputs | EarlierOutputs,
    first: RangeOutputs | EarlierOutputs,
    *,
    where: str = "",
) -> None:
    """Compare what the shards of a range gave in two first passes."""
    positions = all_positions(groups)[part.start : part.stop]
    one, other = (
        ShardRows(groups, of_range.rows, positions=positions).parts(of_range.outputs)
        for of_range in (again, first)
    )
    for position in positions:
        shard = shard_name(groups, position)
        name = f"{shard}, {where}" if where else shard
        comparison.compare(name, one[position], other[position])
