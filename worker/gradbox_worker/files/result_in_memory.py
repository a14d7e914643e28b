"""A result that stays in this process: what a result file would hold, and no file.

It is filled as `ResultOnDisk` is. Its tensors are copies on the CPU in row-major order, as a file
has them, for what a computation hands back may be the model's own.

Shapes: B samples, Y outputs, R rows of a parameter's dim 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gradbox.protocol import ResultView
from gradbox.results.result_files import HeldTensors
from gradbox_worker.files.placed_rows import Piece
from gradbox_worker.files.result_file import Written, laid_out
from gradbox_worker.files.result_in_place import ResultOnDisk


class ResultInMemory:
    """A result while it is made."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._rows: dict[str, Tensor] = {}  # (B, Y, R, ...)
        self._stated: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> ResultInMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows = {}

    def lay_out(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        *,
        squeezed: bool,
    ) -> None:
        """Take memory for tensors that `write` fills; see `ResultOnDisk.lay_out`."""
        for name, (samples, outputs, *shape) in shapes.items():
            lead = (samples,) if squeezed else (samples, outputs)
            self._stated[name] = (*lead, *shape)
            self._rows[name] = torch.empty(samples, outputs, *(shape or [1]), dtype=dtypes[name])

    def write(self, name: str, at: Piece, piece: Tensor) -> None:
        """Write the piece (b, y, r, ...) at these samples, outputs and rows."""
        self._rows[name][at].copy_(piece)

    @property
    def rows_bytes(self) -> int:
        """What the tensors take that were laid out."""
        return sum(rows.nbytes for rows in self._rows.values())

    def keep(self, place: Path) -> None:
        """Keep nothing: no other attempt comes."""

    def go_on(self, place: Path) -> bool:
        """Return that there was no earlier attempt."""
        return False

    def commit(self, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> Written:
        """Add the tensors that were computed whole, and return all of them.

        Raises:
            InvalidInputs: a dtype has no place in a safetensors file.
        """
        found = {name: rows.view(self._stated[name]) for name, rows in self._rows.items()}
        for name, tensor in tensors.items():
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
            found[name] = copy.copy_(tensor.detach())
        laid_out({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()})
        size_bytes = sum(tensor.nbytes for tensor in found.values())
        # No file, no digest: nobody can ask for its bytes.
        view = ResultView(size_bytes=size_bytes, sha256="")
        return Written(view, tensors=HeldTensors(found, metadata))


ResultPlace = ResultOnDisk | ResultInMemory
