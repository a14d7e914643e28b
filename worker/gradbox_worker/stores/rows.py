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
# What a block takes in float32. A larger one is mapped anew each time, which doubles the time of
# products with 100 queries; each of many smaller ones waits for all threads several times.
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

    Raises:
        InvalidInputs: a part is not there.
    """
    first = 0
    for part in parts:
        with opened(part) as file:
            stored = file.get_slice(ROWS)
            num_rows, num_columns = stored.get_shape()
            for start, stop in slabs(num_rows, 4 * num_rows * num_columns, BLOCK_BYTES):
                yield first + start, stored[start:stop].to(device, torch.float32)
            first += num_rows


def ids_at(parts: Sequence[Path], rows: Sequence[int]) -> Ids:
    """Return the ids of some rows, in their order."""
    ids: list[int | str] = []
    for part in parts:
        ids += read_ids(part)
    return [ids[row] for row in rows]  # type: ignore[return-value]  # one store's are of one type
