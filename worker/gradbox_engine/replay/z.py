"""Z, and where each shard lies in it.

Z of a group is the concatenation of its shards' z along dim 0; a 0-dim z counts as one row.
Legend: N rows of a group, b rows of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradbox_engine.errors import BadInputs, BadOutput
from gradbox_engine.model.outputs import Outputs
from gradbox_engine.model.shard_feed import Position
from gradbox_engine.replay.chunks import joined
from gradbox_engine.requests import Group


class Assembly:
    """The outputs of all groups in one piece each, and each shard's part of them."""

    def __init__(self, groups: Sequence[Group], outputs: Mapping[Position, Outputs]) -> None:
        """Put together; where the shards' rows lie one behind the other nothing is copied.

        Raises:
            BadOutput: shards of one group differ in names, dtypes or trailing dimensions.
        """
        self.groups: dict[str, Outputs] = {}
        self._rows: dict[Position, tuple[int, int]] = {}
        self._bare: set[tuple[Position, str]] = set()  # whose z is 0-dim
        for index, group in enumerate(groups):
            shards = {p: outputs[p] for p in sorted(outputs) if p.group == index}
            if shards:
                self.groups[group.name] = self._concatenate(group.name, shards)
        self._names = [group.name for group in groups]

    def part(
        self, position: Position, groups: Mapping[str, Mapping[str, Tensor | None]]
    ) -> Outputs:
        """Return a shard's views of tensors shaped like Z; names without a tensor are left out."""
        whole = groups[self._names[position.group]]
        start, stop = self._rows[position]
        return {
            name: tensor[start] if (position, name) in self._bare else tensor[start:stop]
            for name, tensor in whole.items()
            if tensor is not None
        }

    def _concatenate(self, group: str, shards: Mapping[Position, Outputs]) -> Outputs:
        first_position, first = next(iter(shards.items()))
        start = 0
        for position, outputs in shards.items():
            for name, z in outputs.items():
                _check_alike(group, position, z, first.get(name), first_position)
            num_rows = {1 if z.ndim == 0 else z.shape[0] for z in outputs.values()}
            if outputs.keys() != first.keys() or len(num_rows) != 1:
                raise BadOutput(
                    f"group {group!r}, shard {position.shard}: expected {sorted(first)} with the "
                    f"same number of samples, got {_shapes(outputs)}"
                )
            stop = start + num_rows.pop()
            self._rows[position] = (start, stop)
            self._bare.update((position, name) for name, z in outputs.items() if z.ndim == 0)
            start = stop
        return {name: joined([z[name] for z in shards.values()]) for name in first}


def permutation(order: Sequence[int] | Tensor, num_rows: int, *, group: str) -> Tensor:
    """Return `order` as an int64 tensor of shape (N,).

    Raises:
        BadInputs: it is not a permutation of 0 … N−1.
    """
    index_N = torch.as_tensor(order, dtype=torch.int64).cpu()
    if index_N.shape != (num_rows,) or not torch.equal(
        index_N.sort().values, torch.arange(num_rows)
    ):
        raise BadInputs(
            f"group {group!r}: expected order to be a permutation of {num_rows} samples, got "
            f"shape {tuple(index_N.shape)} with {len(set(index_N.flatten().tolist()))} different "
            f"entries"
        )
    return index_N


def _check_alike(
    group: str, position: Position, z: Tensor, first: Tensor | None, first_position: Position
) -> None:
    if first is None or (z.shape[1:] == first.shape[1:] and z.dtype == first.dtype):
        return
    raise BadOutput(
        f"group {group!r}: expected the z of all shards to have one dtype and to differ in dim 0 "
        f"alone, got {z.dtype} {tuple(z.shape)} from shard {position.shard} and {first.dtype} "
        f"{tuple(first.shape)} from shard {first_position.shard}; pool over the dimension that "
        f"varies by readout="
    )


def _shapes(outputs: Outputs) -> str:
    return ", ".join(f"{name!r} {tuple(z.shape)}" for name, z in outputs.items())
