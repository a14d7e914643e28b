"""Reads what a picture is drawn from, and keeps it, so that the next reads only what changed."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from gradbox.protocol import JobState, ModelView
from gradbox_service.accounting.usage import MINUTE_S, BusyByWorker
from gradbox_service.backing import Backing
from gradbox_service.dashboard.picture import (
    MINUTES_SHOWN,
    Picture,
    devices_shown,
    jobs_shown,
    models_shown,
)
from gradbox_service.fleet import WorkerPresence
from gradbox_service.fleet.workers import offered_versions
from gradbox_service.jobs import JobRecord
from gradbox_service.jobs.charges import busy_with_running


class Source:
    """The box as it was last read. Only one thread at a time may draw."""

    def __init__(self, box: Backing) -> None:
        self._box = box
        self._active: dict[str, JobRecord] = {}
        self._views: dict[tuple[str, str], ModelView] = {}
        self._started: frozenset[tuple[str, float]] = frozenset()

    def draw(self, changed: Collection[str], everything: bool) -> Picture:
        """Read what changed, and return the picture.

        Args:
            changed: ids of jobs whose records are to be read again.
            everything: read all records instead.
        """
        now_s = time.time()
        if everything:
            self._active = {record.id: record for record in self._box.records.active()}
        for job_id in changed:
            self._read_again(job_id)
        running = [r for r in self._active.values() if r.state is JobState.RUNNING]
        workers = self._box.fleet.workers()
        return Picture(
            now_s=now_s,
            operation=self._box.operation.read(),
            num_running=len(running),
            num_queued=len(self._active) - len(running),
            jobs=jobs_shown(self._active.values(), self._box.records.places()),
            devices=devices_shown(workers, self._busy_ms(running, now_s), now_s=now_s),
            models=models_shown(workers, self._model_views(workers)),
        )

    def _read_again(self, job_id: str) -> None:
        record = self._box.records.get(job_id)
        if record is None or record.state.final:
            self._active.pop(job_id, None)
        else:
            self._active[job_id] = record

    def _busy_ms(self, running: Sequence[JobRecord], now_s: float) -> BusyByWorker:
        last = int(now_s // MINUTE_S)
        charged = self._box.usage.busy_ms(last - MINUTES_SHOWN + 1, last)
        return busy_with_running(charged, running, now_s=now_s)

    def _model_views(self, workers: Sequence[WorkerPresence]) -> dict[tuple[str, str], ModelView]:
        """Return what models look like: descriptions are long, so each is read once.

        A worker that was started anew may describe the same version otherwise.
        """
        started = frozenset((worker.name, worker.started_s) for worker in workers)
        if started != self._started:
            self._views, self._started = {}, started
        for name, versions in offered_versions(workers).items():
            if (name, versions[0]) not in self._views:
                view = self._box.fleet.model(name, version=versions[0])
                if view is not None:
                    self._views[name, versions[0]] = view
        return self._views
