"""Dense rows on their way from a device to the one result file of a job over several devices.

The leader lays the file out, once, when the first device knows what it will write. A device on the
leader's machine then writes its rows to the file itself. Another one hands them over in blocks, one
of which waits to be taken while the next is made; the leader writes them.

The engine calls from the thread that computes, the leader from another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Final

import torch
from torch import Tensor

from gradbox_worker.cluster.buffers import TensorBuffer
from gradbox_worker.computations.execution import StopNow
from gradbox_worker.files.placed_rows import Piece, PlacedRows, Placement

POLL_S: Final = 0.2


@dataclass(frozen=True)
class RowLayout:
    """What the file is to have room for, see `ResultOnDisk.lay_out`."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    squeezed: bool


@dataclass(frozen=True)
class RowBlock:
    """A piece of the rows, and its place."""

    name: str
    at: Piece
    piece: TensorBuffer


Handed = RowLayout | RowBlock


class RowOutlet:
    """Stands for the result file on a device; see `dense_rows.RowsFile`."""

    def __init__(self, *, while_waiting: Callable[[], object], kept_as: str) -> None:
        """Know of no file yet.

        Args:
            kept_as: the file's second name in the folder of checkpoints, which an earlier attempt
                may have given it.
            while_waiting: called every 0.2 s while a call waits for the leader; may raise.
        """
        self._while_waiting, self._kept_as = while_waiting, kept_as
        self._changed = Condition()
        self._waiting: deque[Handed] = deque()
        self._laid_out: RowLayout | None = None
        self._answered = self._woken = False
        self._placement: Placement | None = None
        self._file: PlacedRows | None = None

    def lay_out(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        *,
        squeezed: bool,
    ) -> None:
        """Have the leader lay the file out, and wait until it has.

        Raises:
            StopNow: the attempt has ended.
        """
        layout = RowLayout(dict(shapes), dict(dtypes), squeezed)
        if layout == self._laid_out:
            return
        self._hand_over(layout)
        self._wait_until(lambda: self._answered)
        self._laid_out = layout
        if self._placement is not None:
            try:
                self._file = PlacedRows(self._placement)
            except FileNotFoundError:
                raise StopNow from None

    def write(self, name: str, at: Piece, piece: Tensor) -> None:
        """Write a piece, or hand a copy of it over.

        Raises:
            StorageFull: the disk does not hold it.
        """
        if self._file is not None:
            self._file.write(name, at, piece)
            return
        self._wait_until(lambda: not self._waiting)
        self._hand_over(RowBlock(name, at, TensorBuffer.of(piece.detach().cpu().clone())))

    def keep(self, place: Path) -> str | None:
        """Flush the rows that were written here, for another attempt; see `ResultOnDisk.keep`.

        Raises:
            OSError: they are written elsewhere, or the file cannot have a second name.
        """
        if self._laid_out is None:
            return None
        if self._file is None:
            raise OSError("the rows of this device are written on another machine")
        self._file.keep(place.with_name(self._kept_as))
        return self._kept_as

    def go_on(self, place: Path) -> bool:
        """Return whether a file that was kept is the one that this attempt goes on with."""
        return place.name == self._kept_as and place.exists()

    def taken(self, *, wait_s: float) -> list[Handed]:
        """Return what was handed over since the last call, after waiting for some."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._woken, wait_s)
            found, self._woken = list(self._waiting), False
            self._waiting.clear()
            self._changed.notify_all()
            return found

    def place(self, placement: Placement | None) -> None:
        """Tell where the file is; None: rows are to be handed over."""
        with self._changed:
            self._placement, self._answered = placement, True
            self._changed.notify_all()

    def end_wait(self) -> None:
        """Have `taken` return now: a range has ended."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _hand_over(self, handed: Handed) -> None:
        with self._changed:
            self._waiting.append(handed)
            self._changed.notify_all()

    def _wait_until(self, happened: Callable[[], object]) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(happened, POLL_S):
                    return
            self._while_waiting()
