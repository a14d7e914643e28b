"""The devices of a per-sample job as their leader sees them (`ranges.samples.SampleDevices`).

What crosses processes, as NumPy buffers in the object store:

    dense rows     none from a device on the leader's machine, which writes them into the result
                   file; from others in blocks, which the leader writes
    factors        of a range to the leader, or to another device for a block of a Gram
    sums           clipped sums and vjps, to the leader
    values         what there is one of for each sample: losses, outputs, norms, projections, blocks
                   of a Gram; and what the loss reads for a range, to its device
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Final

import ray
import torch
from torch import Tensor

from gradbox_engine.per_sample.planned_model import Plans
from gradbox_engine.per_sample.planning.model import Shapes
from gradbox_engine.ranges import Range
from gradbox_engine.ranges.one_device import done as at_once
from gradbox_engine.ranges.samples import (
    RangeSamples,
    Rows,
    SampleDevice,
    SampleRanges,
    SampleTask,
)
from gradbox_engine.ranges.samples.sample_ranges import gram_of
from gradbox_engine.ranges.samples.split_samples import SUMMED
from gradbox_engine.requests import Phase
from gradbox_factors import Factored
from gradbox_service.store.files import files_of
from gradbox_worker.cluster.buffers import as_buffers, num_bytes
from gradbox_worker.cluster.helper_job import SampleAnswer, SharedBySamples
from gradbox_worker.cluster.helpers import Helpers, LedProgress, OpenHelper
from gradbox_worker.cluster.row_outlet import Handed, RowLayout
from gradbox_worker.files.placed_rows import Piece, Placement
from gradbox_worker.files.result_in_place import ResultOnDisk
from gradbox_worker.files.rounded_gradients import Measured, RoundedGradients
from gradbox_worker.work import Work

WAIT_S: Final = 0.2
ROWS: Final = ".rows"


def rows_name(work: Work, result: ResultOnDisk) -> str:
    """Return the second name of a job's result file, having gone on with an earlier attempt's."""
    for path in files_of(work.checkpoints, work.job_id):
        if path.suffix == ROWS and result.go_on(path):
            return path.name
    return f"{work.job_id}.{work.attempt}{ROWS}"


class SharedRows:
    """The result file of a job whose devices all write dense rows into it; see `leading.Rows`."""

    def __init__(self, result: ResultOnDisk, kept_as: str) -> None:
        """Lay nothing out yet.

        Args:
            kept_as: the file's second name in the folder of checkpoints, which any device gives it.
        """
        self._result, self._kept_as = result, kept_as
        self._layout: RowLayout | None = None
        self._laying_out = Lock()

    def lay_out(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        *,
        squeezed: bool,
    ) -> None:
        """Lay the file out, once."""
        layout = RowLayout(dict(shapes), dict(dtypes), squeezed)
        with self._laying_out:
            if self._layout is None:
                self._result.lay_out(shapes, dtypes, squeezed=squeezed)
                self._layout = layout
        assert layout == self._layout

    def placement(self) -> Placement:
        """Return where another process of this machine may write."""
        return self._result.placement()

    def write(self, name: str, at: Piece, piece: Tensor) -> None:
        """Write a piece; two of them never have the same place."""
        self._result.write(name, at, piece)

    def keep(self, place: Path) -> str | None:
        """See `ResultOnDisk.keep`."""
        return self._result.keep(place.with_name(self._kept_as))

    def go_on(self, place: Path) -> bool:
        """Return whether a file that was kept is the one that this attempt goes on with."""
        return place.name == self._kept_as and place.exists()


@dataclass(frozen=True)
class HeldRows:
    """The rows of a range as factors, on the helper that has them; None: here."""

    helper: OpenHelper | None
    index: int


class LedSampleDevices:
    """The devices of one job, of which the first one is this."""

    def __init__(
        self,
        helpers: Helpers,
        own: SampleRanges,
        *,
        device: torch.device,
        rounding: RoundedGradients,
        rows: SharedRows,
        progress: LedProgress,
    ) -> None:
        self.helpers, helpers.device = helpers, device
        self._own, self._rows, self._progress = own, rows, progress
        self._own_rows: dict[int, Factored] = {}
        self._rounding = rounding
        self._measured: list[Measured] = []
        self._shared: dict[tuple[int, int, int], Any] = {}
        self._factors: dict[HeldRows, Any] = {}

    def take(self, part: Range) -> SampleDevice:
        """Return a device for a call on a range."""
        helper = self.helpers.take(part)
        return self if helper is None else SamplesOnHelper(helper, self)

    def step(self, phase: Phase, done: int, total: int) -> None:
        """Hear about once a second that ranges run, as the observer of the whole job."""
        self._progress.tick(phase, total)

    def add_rounding(self) -> None:
        """Take into account what helpers have rounded."""
        for measured in self._measured:
            self._rounding.add(measured)

    # --- this device -----------------------------------------------------------------------------

    def plans(self, part: Range, shapes: Collection[Shapes], *, of_others: bool) -> Future[Plans]:
        """Plan shapes that the range's shards have."""
        return at_once(partial(self._own.plans, part, shapes, of_others=of_others))

    def smaller(self, part: Range, task: SampleTask) -> Future[bool]:
        """Return whether `form="auto"` keeps factors."""
        return at_once(self._own.smaller, part, task)

    def run(self, part: Range, task: SampleTask) -> Future[RangeSamples]:
        """Compute a range."""
        self._progress.total = task.num_samples
        found = self._own.run(part, task)
        if isinstance(found.rows, Factored):
            self._own_rows[part.index] = found.rows
            found = replace(found, rows=HeldRows(None, part.index))
        return at_once(lambda: found)

    # --- factors ---------------------------------------------------------------------------------

    def gram(self, left: Rows, right: Rows | None, *, trace: bool) -> Future[Tensor]:
        """Multiply the rows of two ranges, on the device of either, so that all do as much."""
        assert isinstance(left, HeldRows)
        assert right is None or isinstance(right, HeldRows)
        where = left if right is None or (left.index + right.index) % 2 == 0 else right
        there = [r for r in (left, right) if r is not None and r.helper is not None]
        helpers = [r.helper for r in there if r.helper is not None]
        if not helpers:
            return at_once(partial(gram_of, self._mine(left), self._mine(right), trace=trace))
        if where.helper is None:  # the other one's factors are fetched

            def here(found: Factored) -> Tensor:
                self.helpers.count("factors", num_bytes(found))
                sides = [found if rows is there[0] else self._mine(rows) for rows in (left, right)]
                return gram_of(sides[0], sides[1], trace=trace)

            return self.helpers.future(self._sent(there[0]), here, helpers=helpers)

        def then(found: tuple[Tensor, int]) -> Tensor:
            gram, moved_bytes = found
            self.helpers.count("factors", moved_bytes)
            self.helpers.count("values", num_bytes(gram))
            return gram

        sides = [
            r if r is None else r.index if r is where else self._sent(r) for r in (left, right)
        ]
        return self.helpers.future(where.helper.ask("gram", *sides, trace), then, helpers=helpers)

    def _mine(self, rows: HeldRows | None) -> Factored | None:
        return None if rows is None else self._own_rows[rows.index]

    def _sent(self, rows: HeldRows) -> Any:
        """Return a range's factors for another device, or a reference to those of another one."""
        if rows.helper is None:
            return self._own_rows[rows.index]
        if rows not in self._factors:
            self._factors[rows] = rows.helper.ask("factors", rows.index)
        return self._factors[rows]

    def forget(self, rows: HeldRows) -> None:
        """Ask for a range's factors again, for they are made again."""
        self._factors.pop(rows, None)

    # --- what helpers give -----------------------------------------------------------------------

    def shared(self, task: SampleTask) -> Any:
        """Return a reference to what the tasks of all ranges have; put once."""
        vectors = task.vectors if isinstance(task.vectors, dict) else None
        key = id(task.plans), id(task.against), id(vectors)
        if key not in self._shared:
            shared = as_buffers(SharedBySamples(task.plans, task.against, vectors))
            self.helpers.count("inputs", num_bytes(shared))
            self._shared[key] = ray.put(shared)
        return self._shared[key]

    def take_rows(self, helper: OpenHelper, answer: Any) -> None:
        """Take the dense rows that a helper hands over, until it has answered.

        Raises:
            StorageFull: the disk does not hold them.
        """
        while True:
            ended = bool(ray.wait([answer], timeout=0)[0])
            handed = ray.get(helper.actor.rows.remote("take_rows", 0.0 if ended else WAIT_S))
            for one in handed:
                self._write(one, helper)
            if ended and not handed:
                return

    def joined(self, answer: SampleAnswer, task: SampleTask, rows: Rows | None) -> RangeSamples:
        """Return what a range gave, here."""
        self._measured.append(answer.rounded)
        self.helpers.note_resumed(answer.resumed)
        result, kind = answer.result, "sums" if task.reduce in SUMMED else "values"
        self.helpers.count("factors", num_bytes(result.factors))
        self.helpers.count(kind, num_bytes(result.arrays))
        self.helpers.count(
            "values", num_bytes([result.parameter_norms, result.values, result.other_values])
        )
        return RangeSamples(result, rows)

    def _write(self, handed: Handed, helper: OpenHelper) -> None:
        if isinstance(handed, RowLayout):
            self._rows.lay_out(handed.shapes, handed.dtypes, squeezed=handed.squeezed)
            placement = self._rows.placement() if helper.writes_files else None
            ray.get(helper.actor.rows.remote("place_rows", placement))
            return
        self.helpers.count("rows", num_bytes(handed))
        self._rows.write(handed.name, handed.at, handed.piece.tensor(copy=False))


class SamplesOnHelper:
    """One helper, for a call on a range."""

    def __init__(self, helper: OpenHelper, devices: LedSampleDevices) -> None:
        self._helper, self._devices = helper, devices

    def plans(self, part: Range, shapes: Collection[Shapes], *, of_others: bool) -> Future[Plans]:
        """Plan shapes that the range's shards have."""
        return self._devices.helpers.call(self._helper, "plans", part, shapes, of_others)

    def smaller(self, part: Range, task: SampleTask) -> Future[bool]:
        """Return whether `form="auto"` keeps factors."""
        return self._devices.helpers.future(
            self._asked("smaller", part, task), helpers=(self._helper,)
        )

    def run(self, part: Range, task: SampleTask) -> Future[RangeSamples]:
        """Compute a range."""
        helper, devices = self._helper, self._devices
        helper.held.add(part.index)
        answer = self._asked("run", part, task)
        rows = None
        if task.keep_rows:
            rows = HeldRows(helper, part.index)
            devices.forget(rows)

        def then(found: SampleAnswer) -> RangeSamples:
            if not task.keep_rows and not task.of_others:
                helper.held.discard(part.index)
                devices.helpers.free_if_empty(helper)
            return devices.joined(found, task, rows)

        return devices.helpers.future(
            answer,
            then,
            helpers=(helper,),
            meanwhile=partial(devices.take_rows, helper, answer),
        )

    def _asked(self, method: str, part: Range, task: SampleTask) -> Any:
        """Return a reference to what the helper makes of a task, whose rows it is sent."""
        vectors = None if isinstance(task.vectors, dict) else task.vectors
        sent = replace(task, plans={}, against=None, vectors=vectors)
        self._devices.helpers.count("inputs", num_bytes(sent))
        return self._helper.ask(method, part, sent, self._devices.shared(task))
