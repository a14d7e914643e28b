"""Dense results, piece by piece within a budget.

Shapes: B samples of a shard, Y outputs, R rows of a parameter's dim 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradbox_engine.per_sample.arena import Sink
from gradbox_factors import Term

Piece = tuple[slice, slice, slice]


@dataclass
class Pieces:
    """Cuts arrays so that one piece stays within `budget_bytes`, and makes each in one scratch.

    Running out of CUDA memory halves the budget and goes on.
    """

    budget_bytes: int
    _scratch: Tensor | None = field(default=None, repr=False)

    def send(self, term: Term, sink: Sink, first_sample: int, first_output: int) -> None:
        """Write a term to `sink`, whose indices begin at the given sample and output."""
        pieces = self._cut(term)
        while (cut := next(pieces, None)) is not None:
            samples, outputs, rows = cut
            try:
                piece = self._made(term, samples, outputs, rows)
            except torch.OutOfMemoryError:
                if self.budget_bytes <= _row_bytes(term):
                    raise
                self.budget_bytes = max(self.budget_bytes // 2, _row_bytes(term))
                self._scratch = None
                pieces = self._cut(term)  # from the start: smaller pieces begin elsewhere
                continue
            at = (_shifted(samples, first_sample), _shifted(outputs, first_output), rows)
            sink.write(term.parameter, at, piece)

    def _cut(self, term: Term) -> Iterator[Piece]:
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

    def _made(self, term: Term, samples: slice, outputs: slice, rows: slice) -> Tensor:
        part = term.narrow(samples, outputs)
        if (rows.start, rows.stop) != (0, term.num_rows):
            return part.rows(rows.start, rows.stop)
        sizes = (part.samples, part.outputs, term.num_rows, *term.shape[1:])
        flat = self._region(part.dense_bytes, part)
        out = flat.view(term.dtype)[: part.dense_bytes // term.dtype.itemsize]
        shaped = out.view(part.samples, part.outputs, *term.shape)
        part.write(shaped, accumulate=False)
        return shaped.view(sizes)

    def _region(self, size: int, term: Term) -> Tensor:
        device = next(iter(term.tensors().values())).device
        if self._scratch is None or self._scratch.numel() < size or self._scratch.device != device:
            self._scratch = None
            self._scratch = torch.empty(-(-size // 64) * 64, dtype=torch.uint8, device=device)
        return self._scratch


def _row_bytes(term: Term) -> int:
    return max(1, term.dense_bytes // max(1, term.samples * term.outputs * term.num_rows))


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def shapes_of(terms: Mapping[str, Term], samples: int, outputs: int) -> dict[str, tuple[int, ...]]:
    """Return every parameter's (B, Y, *shape) for the whole result."""
    return {name: (samples, outputs, *term.shape) for name, term in terms.items()}
