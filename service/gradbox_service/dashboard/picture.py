"""What the box looked like at one moment, and what one caller may see of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Final

from gradbox.protocol import (
    BoxJob,
    BoxModel,
    BoxView,
    CallerView,
    DeviceView,
    JobState,
    ModelView,
)
from gradbox_service.accounting.usage import MINUTE_S, BusyByWorker
from gradbox_service.fleet import WorkerPresence
from gradbox_service.fleet.workers import offered_versions, unusable_models
from gradbox_service.identity.tokens import TokenInfo
from gradbox_service.jobs import JobRecord, QueuePosition

# As many of the jobs that wait are shown: what lies behind changes too often.
MAX_WAITING: Final = 100
MINUTES_SHOWN: Final = 60
KEY_LENGTH: Final = 12


def seen_by(box: BoxView, caller: TokenInfo) -> BoxView:
    """Return what this caller may see of the box."""
    jobs = [
        job
        if caller.admin or job.owner == caller.name
        else job.model_copy(update={"id": None, "name": None})
        for job in box.jobs
    ]
    you = CallerView(name=caller.name, admin=caller.admin)
    return box.model_copy(update={"you": you, "jobs": jobs})


def key_of(job_id: str) -> str:
    """Return what a job is known by where its id is not to be known."""
    return hashlib.sha256(job_id.encode()).hexdigest()[:KEY_LENGTH]


def jobs_shown(active: Iterable[JobRecord], positions: Mapping[str, QueuePosition]) -> list[BoxJob]:
    """Return the jobs that run, oldest attempt first, and then the first of those that wait."""
    running: list[JobRecord] = []
    waiting: list[JobRecord] = []
    for record in active:
        (waiting if record.state is JobState.QUEUED else running).append(record)
    running.sort(key=lambda record: (record.started_s or 0.0, record.id))
    last = QueuePosition(max((waits_at.position for waits_at in positions.values()), default=0) + 1)
    waiting.sort(key=lambda r: (positions.get(r.id, last).position, r.created_s, r.id))
    return [_job(record) for record in running] + [
        _job(record, position=position, begins_s=positions.get(record.id, last).begins_s)
        for position, record in enumerate(waiting[:MAX_WAITING], start=1)
    ]


def devices_shown(
    workers: Iterable[WorkerPresence], busy_ms: BusyByWorker, *, now_s: float
) -> list[DeviceView]:
    """Return the devices with what they did in the last hour."""
    last = int(now_s // MINUTE_S)
    minutes = range(last - MINUTES_SHOWN + 1, last + 1)
    found = []
    for worker in workers:
        busy = [busy_ms.get(worker.name, {}).get(minute, 0) for minute in minutes]
        shown_ms = 1000.0 * (now_s - minutes[0] * MINUTE_S)
        found.append(
            DeviceView(
                **{name: getattr(worker, name) for name in _OF_WORKERS},
                worker=worker.name,
                job=None if worker.job is None else key_of(worker.job),
                busy=[min(100, round(ms / (10 * MINUTE_S))) for ms in busy],
                busy_share=round(min(1.0, sum(busy) / shown_ms), 3),
            )
        )
    return found


def models_shown(
    workers: Sequence[WorkerPresence], views: Mapping[tuple[str, str], ModelView]
) -> list[BoxModel]:
    """Return the models that live workers offer, each in the version that most of them offer."""
    found = []
    for name, versions in offered_versions(workers).items():
        view = views.get((name, versions[0]))
        found.append(
            BoxModel(
                name=name,
                version=versions[0],
                num_parameters=0 if view is None else view.num_parameters,
                methods={} if view is None else view.methods,
                workers=[w.name for w in workers if w.models.get(name) == versions[0]],
                loaded=[w.name for w in workers if w.memory and name in w.memory.models],
                program="" if view is None else view.example_code(),
            )
        )
    unusable = unusable_models(workers).items()
    return found + [BoxModel(name=name, usable=False, reason=why) for name, why in unusable]


def _job(
    record: JobRecord, *, position: int | None = None, begins_s: float | None = None
) -> BoxJob:
    return BoxJob(
        **{name: getattr(record, name) for name in _OF_JOBS},
        key=key_of(record.id),
        position=position,
        begins_s=begins_s,
        attempts=record.attempt,
        worker=record.worker if record.state is JobState.RUNNING else None,
    )


# What is shown as the record, or the worker, has it.
_OF_JOBS: Final = (BoxJob.model_fields.keys() & {f.name for f in fields(JobRecord)}) - {"worker"}
_OF_WORKERS: Final = (DeviceView.model_fields.keys() & WorkerPresence.model_fields) - {"job"}
