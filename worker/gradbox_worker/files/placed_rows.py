"""Rows written at their places in a result file that was laid out.

Shapes: B samples, Y outputs, R rows of a parameter's dim 0.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from gradbox.tensors.tensor_bytes import bytes_in_order
from gradbox_service.store.files import WRITE_OUT_BYTES, begin_to_write_out

MOVED_BYTES: Final = 16 * 2**20
Piece = tuple[slice, slice, slice]
"""Samples, outputs, and rows of the parameter's dim 0."""


@dataclass(frozen=True)
class Region:
    """Where a tensor (B, Y, R, ...) lies in the file, in bytes."""

    start: int
    outputs: int
    rows: int
    row_bytes: int

    def offset(self, sample: int, output: int, row: int) -> int:
        """Return where row `row` of a sample's output begins."""
        return self.start + ((sample * self.outputs + output) * self.rows + row) * self.row_bytes


class InPlaceWriter:
    """Writes to an open file at offsets, and has the system write out what it has cached of it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._in_cache_bytes = 0

    def piece(self, region: Region, at: Piece, piece: Tensor) -> None:
        """Write a piece (b, y, r, ...) of the tensor that lies in a region.

        Raises:
            OSError: it cannot be written.
        """
        samples, outputs, rows = at
        data = bytes_in_order(piece)
        every_row = rows.stop - rows.start == region.rows
        every_output = outputs.stop - outputs.start == region.outputs
        # What lies side by side in the file is written at once.
        steps = (
            samples.stop - samples.start if every_row and every_output else 1,
            outputs.stop - outputs.start if every_row else 1,
        )
        length = steps[0] * steps[1] * (rows.stop - rows.start) * region.row_bytes
        done = 0
        for sample in range(samples.start, samples.stop, max(1, steps[0])):
            for output in range(outputs.start, outputs.stop, max(1, steps[1])):
                offset = region.offset(sample, output, rows.start)
                self.put(data[done : done + length], offset)
                done += length

    def put(self, data: memoryview, offset: int) -> None:
        """Write bytes at an offset, all of them.

        Raises:
            OSError: they cannot be written.
        """
        while len(data):
            written = os.pwrite(self.descriptor, data, offset)
            data, offset = data[written:], offset + written
            self._in_cache_bytes += written
        if self._in_cache_bytes >= WRITE_OUT_BYTES:
            self._in_cache_bytes = 0
            begin_to_write_out(self.descriptor)

    def move(self, start: int, stop: int, *, by: int) -> None:
        """Move bytes towards the end, the last ones first.

        Raises:
            OSError: they cannot be written.
        """
        for begin in reversed(range(start, stop, MOVED_BYTES)):
            data = os.pread(self.descriptor, min(MOVED_BYTES, stop - begin), begin)
            self.put(memoryview(data), begin + by)
