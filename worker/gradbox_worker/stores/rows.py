"""The rows of a store, read from its parts in blocks. Shapes: N rows, K numbers a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def blocks_of_rows(parts: Sequence[Path], *, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Give the first row of each block and the block, (n, K) in float32 on a device.

    All are made in one memory, so a block is gone with the next.

    Raises:
        InvalidInputs: a part is not there.
    """
    first, memory = 0, torch.empty(0, 0, dtype=torch.float32, device=device)
    for part in parts:
        with opened(part) as file:
            stored = file.get_slice(ROWS)
            num_rows, num_columns = stored.get_shape()
            for start, stop in slabs(num_rows, 4 * num_rows * num_columns, BLOCK_BYTES):
                if len(memory) < stop - start:
                    memory = memory.new_empty(stop - start, num_columns)
                yield first + start, memory[: stop - start].copy_(stored[start:stop])
            first += num_rows


def ids_at(parts: Sequence[Path], rows: Sequence[int]) -> Ids:
    """Return the ids of some rows, in their order."""
    ids: list[int | str] = []
    for part in parts:
        ids += read_ids(part)
    return [ids[row] for row in rows]  # type: ignore[return-value]  # one store's are of one type
