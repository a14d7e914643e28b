"""Z as it comes in: each shard's rows are written where they will stay.

A group's rows lie in one chunk of memory where shards are of the first one's size or smaller, as is
the rule; so Z is there once, and not a second time in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradbox_engine.model.outputs import Outputs

Place = tuple[int, str]
"""A group's position and the name of one of its outputs."""


class Chunks:
    """Memory for the outputs of a range of shards."""

    def __init__(self, num_shards: Mapping[int, int]) -> None:
        """Take how many shards of each group are to come."""
        self._num_left = dict(num_shards)
        self._chunks: dict[Place, Tensor] = {}
        self._num_filled: dict[Place, int] = {}

    def write(self, group: int, outputs: Outputs) -> Outputs:
        """Return copies without graphs, behind those of the group's shard before."""
        written = {name: self._write((group, name), z) for name, z in outputs.items()}
        self._num_left[group] -= 1
        return written

    def _write(self, place: Place, z: Tensor) -> Tensor:
        rows = as_rows(z.detach())
        chunk, start = self._chunks.get(place), self._num_filled.get(place, 0)
        stop = start + len(rows)
        if chunk is None or not _alike(chunk, rows) or stop > len(chunk):
            start, stop = 0, len(rows)
            size = (stop * max(self._num_left[place[0]], 1), *rows.shape[1:])
            self._chunks[place] = chunk = torch.empty(size, dtype=z.dtype, device=z.device)
        self._num_filled[place] = stop
        written = chunk[start:stop].copy_(rows)
        return written.view(()) if z.ndim == 0 else written


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return all rows in one tensor: a view if they lie one behind the other."""
    rows = [as_rows(part) for part in parts]
    storage, end = rows[0].untyped_storage().data_ptr(), rows[0].storage_offset()
    for part in rows:
        if part.untyped_storage().data_ptr() != storage or part.storage_offset() != end:
            return torch.cat(rows)
        if not part.is_contiguous():
            return torch.cat(rows)
        end += part.numel()
    shape = (sum(map(len, rows)), *rows[0].shape[1:])
    return rows[0].as_strided(shape, rows[0].stride())


def as_rows(z: Tensor) -> Tensor:
    """Return z with dim 0; a 0-dim one is one row."""
    return z.unsqueeze(0) if z.ndim == 0 else z


def _alike(chunk: Tensor, rows: Tensor) -> bool:
    return (
        chunk.shape[1:] == rows.shape[1:]
        and chunk.dtype == rows.dtype
        and chunk.device == rows.device
    )
