"""Dense results written to a sink, piece by piece within a budget.

Shapes: B samples of a shard, Y outputs, R rows of a parameter's dim 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from gradbox_factors import Term

Piece = tuple[slice, slice, slice]


class Sink(Protocol):
    """Takes a dense result in pieces, for instance into a file that is written in place.

    A job that goes on from a checkpoint calls `begin` again, and sends only the rows of the samples
    behind the checkpoint. So who keeps a checkpoint keeps the rows that were sent before it, too.
    """

    def begin(
        self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """Told every parameter's (B, Y, *shape) and dtype before the first piece."""

    def write(self, name: str, at: Piece, piece: Tensor) -> None:
        """Take the piece (b, y, r, ...) at samples, outputs and rows of the parameter's dim 0.

        The piece is only lent: its memory is used again. For a 0-dim parameter rows are 0:1.
        """


@dataclass
class Pieces:
    """Cuts arrays so that one piece stays within `budget_bytes`, and makes each in one buffer.

    Running out of CUDA memory halves the budget and continues.
    """

    budget_bytes: int
    _buffer: Tensor | None = field(default=None, repr=False)

    def send(self, term: Term, sink: Sink, first_sample: int, first_output: int) -> None:
        """Write a term to `sink`, whose indices start at the given sample and output."""
        pieces = self._cut(term)
        while (cut := next(pieces, None)) is not None:
            samples, outputs, rows = cut
            try:
                piece = self._piece(term, samples, outputs, rows)
            except torch.OutOfMemoryError:
                if self.budget_bytes <= _row_bytes(term):
                    raise
                self.budget_bytes = max(self.budget_bytes // 2, _row_bytes(term))
                self._buffer = None
                pieces = self._cut(term)  # from the start: smaller pieces start at other indices
                continue
            at = (_shifted(samples, first_sample), _shifted(outputs, first_output), rows)
            sink.write(term.parameter, at, piece)

    def _cut(self, term: Term) -> Iterator[Piece]:
        if not term.dense_bytes:  # the parameter has no entries
            return
        row_bytes = _row_bytes(term)
        rows = max(1, min(term.num_rows, self.budget_bytes // row_bytes))
        output_bytes = row_bytes * term.num_rows
        outputs = max(1, min(term.outputs, self.budget_bytes // output_bytes))
        samples = max(1, min(term.samples, self.budget_bytes // (output_bytes * outputs)))
        if outputs < term.outputs:
            samples = 1
        for sample in range(0, term.samples, samples):
            for output in range(0, term.outputs, outputs):
                for row in range(0, term.num_rows, rows):
                    yield (
                        slice(sample, min(sample + samples, term.samples)),
                        slice(output, min(output + outputs, term.outputs)),
                        slice(row, min(row + rows, term.num_rows)),
                    )

    def _piece(self, term: Term, samples: slice, outputs: slice, rows: slice) -> Tensor:
        part = term.narrow(samples, outputs)
        if (rows.start, rows.stop) != (0, term.num_rows):
            return part.rows(rows.start, rows.stop)
        sizes = (part.samples, part.outputs, term.num_rows, *term.shape[1:])
        flat = self._memory(part.dense_bytes, part)
        out = flat.view(term.dtype)[: part.dense_bytes // term.dtype.itemsize]
        shaped = out.view(part.samples, part.outputs, *term.shape)
        part.write(shaped, accumulate=False)
        return shaped.view(sizes)

    def _memory(self, size: int, term: Term) -> Tensor:
        device = next(iter(term.tensors().values())).device
        if self._buffer is None or self._buffer.numel() < size or self._buffer.device != device:
            self._buffer = None
            self._buffer = torch.empty(-(-size // 64) * 64, dtype=torch.uint8, device=device)
        return self._buffer


def _row_bytes(term: Term) -> int:
    return max(1, term.dense_bytes // max(1, term.samples * term.outputs * term.num_rows))


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
