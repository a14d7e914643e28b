"""The rows of a store, read from its parts in blocks. Shapes: N rows, K numbers a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from gradbox.errors import InvalidInputs
from gradbox_factors.slabs import slabs
from gradbox_service.stores.ids import Ids, read_ids

ROWS: Final = "samples/projection"
# What a block takes in float32: of a larger one the cache holds less, and each of many smaller ones
# waits for all threads several times.
BLOCK_BYTES: Final = 16 * 2**20


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows, from row `start` of a part on, which is row `first` of the store."""

    part: Path
    start: int
    num_rows: int
    first: int


def opened(path: Path, *, device: str = "cpu") -> Any:
    """Open a file of a store.

    Raises:
        InvalidInputs: it is not there.
    """
    try:
        return safe_open(path, framework="pt", device=device)
    except FileNotFoundError:
        raise InvalidInputs(
            "expected the files of the store on this machine, but one is not there"
        ) from None


def blocks_of(parts: Sequence[Path]) -> list[RowBlock]:
    """Return the blocks that the rows of a store are read in, in their order.

    Raises:
        InvalidInputs: a part is not there.
    """
    blocks, first = [], 0
    for part in parts:
        with opened(part) as file:
            num_rows, num_columns = file.get_slice(ROWS).get_shape()
        for start, stop in slabs(num_rows, 4 * num_rows * num_columns, BLOCK_BYTES):
            blocks.append(RowBlock(part, start, stop - start, first + start))
        first += num_rows
    return blocks


def rows_of(blocks: Sequence[RowBlock], *, device: torch.device) -> Iterator[Tensor]:
    """Give the rows of each block, (n, K) in float32 on a device.

    All are made in one memory, so those of a block are gone with the next.

    Raises:
        InvalidInputs: a part is not there.
    """
    memory = torch.empty(0, 0, dtype=torch.float32, device=device)
    for block in blocks:
        with opened(block.part) as file:
            rows = file.get_slice(ROWS)[block.start : block.start + block.num_rows]
            if len(memory) < len(rows):
                memory = memory.new_empty(rows.shape)
            yield memory[: len(rows)].copy_(rows)


def ids_at(parts: Sequence[Path], rows: Sequence[int]) -> Ids:
    """Return the ids of some rows, in their order."""
    ids: list[int | str] = []
    for part in parts:
        ids += read_ids(part)
    return [ids[row] for row in rows]  # type: ignore[return-value]  # one store's are of one type
