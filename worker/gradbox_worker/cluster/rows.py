"""Dense rows on their way into the one result file of a job over several devices.

The leader lays the file out, once, when the first device knows what it will write, and writes all
of it. A helper hands its rows over in blocks, one of which is written while the next is made. It
calls the leader from the thread that computes; the leader writes in others, beside its own range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Final

import ray
import torch
from ray.exceptions import RayTaskError
from torch import Tensor

from gradbox_service.store.files import files_of
from gradbox_worker.cluster.buffers import TensorBuffer, as_tensors, num_bytes
from gradbox_worker.files.placed_rows import Piece
from gradbox_worker.files.result_in_place import ResultOnDisk
from gradbox_worker.work import Work

POLL_S: Final = 0.2
SUFFIX: Final = ".rows"


class SharedRows:
    """The result file, on the leader; see `computations.leading.Rows`.

    Attributes:
        kept_as: the file's second name in the folder of checkpoints.
    """

    def __init__(self, work: Work, result: ResultOnDisk, count: Callable[[str, int], None]) -> None:
        """Lay nothing out yet; go on with the file of an earlier attempt, if it left one.

        Args:
            count: told of the bytes of rows that helpers hand over.
        """
        self._result, self._checkpoints, self._count = result, work.checkpoints, count
        self.kept_as = f"{work.job_id}.{work.attempt}{SUFFIX}"
        for path in files_of(work.checkpoints, work.job_id):
            if path.suffix == SUFFIX and result.go_on(path):
                self.kept_as = path.name
                break
        self._laid_out: Any = None
        self._changing = Lock()

    def lay_out(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        *,
        squeezed: bool,
    ) -> None:
        """Lay the file out, once."""
        layout = (dict(shapes), dict(dtypes), squeezed)
        with self._changing:
            if self._laid_out is None:
                self._result.lay_out(shapes, dtypes, squeezed=squeezed)
                self._laid_out = layout
        assert layout == self._laid_out

    def write(self, name: str, at: Piece, piece: Tensor) -> None:
        """Write a piece; two of them never have the same place."""
        self._result.write(name, at, piece)

    def keep(self, place: Path) -> str | None:
        """Flush what was written, see `ResultOnDisk.keep`.

        Raises:
            OSError: it cannot have a second name there, as in a folder of another machine.
        """
        if place.parent != self._checkpoints:
            raise OSError("the rows are written on another machine")
        with self._changing:
            return self._result.keep(place.with_name(self.kept_as))

    def go_on(self, place: Path) -> bool:
        """Return whether a file that was kept is the one that this attempt goes on with."""
        return place.name == self.kept_as and place.exists()

    def of_helper(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Do one of these for a helper, whose tensors come as buffers."""
        self._count("rows", num_bytes(arguments))
        return getattr(self, method)(**as_tensors(arguments, copy=False))


class RowsAtLeader:
    """Stands for the result file on a helper."""

    def __init__(
        self,
        leader: Any,
        job: tuple[str, int],
        *,
        kept_as: str,
        while_waiting: Callable[[], object],
    ) -> None:
        """Ask nothing yet.

        Args:
            leader: a handle of its actor.
            job: which one, and which attempt.
            kept_as: see `SharedRows`.
            while_waiting: called every 0.2 s while a call waits for the leader; may raise.
        """
        self._leader, self._job, self._kept_as = leader, job, kept_as
        self._while_waiting = while_waiting
        self._laid_out = False
        self._writing: Any = None

    def lay_out(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        *,
        squeezed: bool,
    ) -> None:
        """Have the leader lay the file out, and wait until it has."""
        self._have("lay_out", shapes=dict(shapes), dtypes=dict(dtypes), squeezed=squeezed)
        self._laid_out = True

    def write(self, name: str, at: Piece, piece: Tensor) -> None:
        """Hand a piece over, once the one before is written.

        Raises:
            StorageFull: the leader's disk did not hold that.
        """
        self.finish()
        self._writing = self._asked(
            "write", name=name, at=at, piece=TensorBuffer.of(piece.detach())
        )

    def finish(self) -> None:
        """Wait until all that was handed over is written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self._wait(writing)

    def keep(self, place: Path) -> str | None:
        """Have the rows flushed for another attempt, see `SharedRows.keep`."""
        kept: str | None = self._have("keep", place=place) if self._laid_out else None
        return kept

    def go_on(self, place: Path) -> bool:
        """Return whether a file that was kept is the one that this attempt goes on with."""
        return place.name == self._kept_as and place.exists()

    def _have(self, method: str, **arguments: Any) -> Any:
        self.finish()
        return self._wait(self._asked(method, **arguments))

    def _asked(self, method: str, **arguments: Any) -> Any:
        return self._leader.rows.remote("rows_of_helper", self._job, method, arguments)

    def _wait(self, answer: Any) -> Any:
        while not ray.wait([answer], timeout=POLL_S)[0]:
            self._while_waiting()
        try:
            return ray.get(answer)
        except RayTaskError as error:
            raise error.cause from None
