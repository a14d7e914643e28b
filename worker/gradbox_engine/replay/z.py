"""Z, and where each shard lies in it.

Z of a group is the concatenation of its shards' z along dim 0; a 0-dim z counts as one row. The
loss sees it in the order that the group asks for, Z[order].

Legend: N rows of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from gradbox_engine.errors import BadOutput
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.calling.shard_feed import Position, all_positions, permutation
from gradbox_engine.requests import Group

NumRows = Mapping[str, Sequence[int | None]]
"""By group, each shard's number of rows in Z; None where its z is 0-dim."""


class ShardRows:
    """The rows of each shard in tensors shaped like Z, in the order of the shards."""

    def __init__(
        self,
        groups: Sequence[Group],
        num_rows: NumRows,
        *,
        positions: Sequence[Position] | None = None,
    ) -> None:
        """Take the numbers of rows.

        Args:
            positions: consecutive shards, whose rows the tensors have; all of them by default.
        """
        self._names = [group.name for group in groups]
        self._slices: dict[Position, int | slice] = {}
        numbers = {group: iter(of_shards) for group, of_shards in num_rows.items()}
        start = dict.fromkeys(num_rows, 0)
        for position in all_positions(groups) if positions is None else positions:
            group = self._names[position.group]
            number, first = next(numbers[group]), start[group]
            start[group] = first + (1 if number is None else number)
            self._slices[position] = first if number is None else slice(first, start[group])

    def parts(self, whole: Mapping[str, Mapping[str, Tensor | None]]) -> dict[Position, Outputs]:
        """Return each shard's views, by the names that have a tensor."""
        return {
            position: {
                name: tensor[rows]
                for name, tensor in whole.get(self._names[position.group], {}).items()
                if tensor is not None
            }
            for position, rows in self._slices.items()
        }


def concatenated(
    groups: Sequence[Group], outputs: Mapping[Position, Outputs]
) -> tuple[dict[str, Outputs], NumRows]:
    """Return Z of each group in the order of the shards, and each shard's number of rows.

    Args:
        outputs: z of every shard, or of a range of them; Z then has their rows alone. Views of Z
            take its place one after the other, so that all of them and Z are never in memory
            together.

    Raises:
        BadOutput: shards of one group differ in names, dtypes or trailing dimensions.
    """
    whole: dict[str, Outputs] = {}
    num_rows: dict[str, list[int | None]] = {}
    by_group: dict[int, list[tuple[int, Outputs]]] = {}
    for position in sorted(outputs):
        by_group.setdefault(position.group, []).append((position.shard, outputs[position]))
    for index, numbered in by_group.items():
        group = groups[index].name
        num_rows[group] = [_num_rows(group, shard, z) for shard, z in numbered]
        for shard, z in numbered:
            check_alike(group, shard, z, numbered[0][1])
        shards = [z for _, z in numbered]
        whole[group] = {
            name: moved_into_one(shards, name, num_rows[group]) for name in list(shards[0])
        }
    return whole, num_rows


def moved_into_one(parts: Sequence[Outputs], name: str, num_rows: Sequence[int | None]) -> Tensor:
    """Return the tensors of one name as one; views of it take their places."""
    rows = [1 if number is None else number for number in num_rows]
    first = parts[0][name]
    if len(parts) == 1 and num_rows[0] is not None:
        return first
    whole = first.new_empty((sum(rows), *first.shape[1:]))
    del first
    start = 0
    for part, number, length in zip(parts, num_rows, rows, strict=True):
        view = whole[start] if number is None else whole[start : start + length]
        part[name] = view.copy_(part[name])
        start += length
    return whole


def ordered(whole: Outputs, group: Group) -> Outputs:
    """Return Z in the order in which the loss sees it."""
    if group.order is None:
        return whole
    order_N = permutation(group.order, _length(whole), group=group.name)
    return {name: z.index_select(0, order_N.to(z.device)) for name, z in whole.items()}


def unordered(whole: Outputs, group: Group) -> Outputs:
    """Return a tensor shaped like Z[order] in the order of the shards."""
    if group.order is None or not whole:
        return whole
    inverse_N = permutation(group.order, _length(whole), group=group.name).argsort()
    return {name: z.index_select(0, inverse_N.to(z.device)) for name, z in whole.items()}


def _length(whole: Outputs) -> int:
    return next(iter(whole.values())).shape[0]


def _num_rows(group: str, shard: int, outputs: Outputs) -> int | None:
    numbers = {None if z.ndim == 0 else z.shape[0] for z in outputs.values()}
    if len(numbers) != 1:
        raise BadOutput(
            f"group {group!r}, shard {shard}: expected outputs with one number of samples, got "
            f"{_shapes(outputs)}; by readout= expand one number for all to (samples,), as in "
            f"scale.expand(len(z)), or pick one output"
        )
    return numbers.pop()


def check_alike(group: str, shard: int, outputs: Outputs, first: Outputs) -> None:
    """Compare what a shard gave with what the first one did.

    Raises:
        BadOutput: they cannot be rows of one Z.
    """
    if outputs.keys() != first.keys():
        raise BadOutput(
            f"group {group!r}, shard {shard}: expected {sorted(first)} as from shard 0, got "
            f"{_shapes(outputs)}"
        )
    for name, z in outputs.items():
        like = first[name]
        if z.shape[1:] != like.shape[1:] or z.dtype != like.dtype:
            raise BadOutput(
                f"group {group!r}: expected the z of all shards to have one dtype and to differ in "
                f"dim 0 alone, got {z.dtype} {tuple(z.shape)} from shard {shard} and {like.dtype} "
                f"{tuple(like.shape)} from shard 0; by readout= pool over the dimension that "
                f"varies, or convert all to one dtype"
            )


def _shapes(outputs: Outputs) -> str:
    return ", ".join(f"{name!r} {tuple(z.shape)}" for name, z in outputs.items())
