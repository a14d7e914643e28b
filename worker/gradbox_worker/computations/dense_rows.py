"""Dense rows on their way into the result file, piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from gradbox_engine import Observer
from gradbox_engine.requests import Phase
from gradbox_worker.computations.sections import GRADS
from gradbox_worker.files.placed_rows import Piece
from gradbox_worker.files.rounded_gradients import RoundedGradients


class RowsFile(Protocol):
    """Where rows are laid out and written: `ResultOnDisk`, or what stands for it elsewhere."""

    def lay_out(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        *,
        squeezed: bool,
    ) -> None: ...
    def write(self, name: str, at: Piece, piece: Tensor) -> None: ...


class Progress:
    """Passes steps on; repeats the last one where a shard takes long, so that a stop is heard."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._last: tuple[Phase, int, int] | None = None

    def step(self, phase: Phase, done: int, total: int) -> None:
        """Hear of a step."""
        self._last = (phase, done, total)
        self._observer.step(phase, done, total)

    def repeat(self) -> None:
        """Ask whether to stop."""
        if self._last is not None:
            self._observer.step(*self._last)


class DenseSink:
    """Hands a dense result's pieces to its file, in the format of the job's transfer."""

    def __init__(
        self, file: RowsFile, rounding: RoundedGradients, progress: Progress, *, squeezed: bool
    ) -> None:
        self._file, self._rounding = file, rounding
        self._progress, self._squeezed = progress, squeezed

    def begin(
        self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """Lay the file out."""
        self._file.lay_out(
            {f"{GRADS}/{name}": shape for name, shape in shapes.items()},
            {
                f"{GRADS}/{name}": self._rounding.stored_dtype(f"{GRADS}/{name}", dtype)
                for name, dtype in dtypes.items()
            },
            squeezed=self._squeezed,
        )

    def write(self, name: str, at: Piece, piece: Tensor) -> None:
        """Round a piece and write it."""
        self._progress.repeat()
        rows = self._rounding.rounded_rows(f"{GRADS}/{name}", piece)
        self._file.write(f"{GRADS}/{name}", at, rows)
