"""What the dispatcher makes of changes."""

from __future__ import annotations

import time

from gradbox_service.backing import Backing
from gradbox_service.jobs import Change, JobRecord
from gradbox_service.queue.active_jobs import ActiveJobs
from gradbox_service.queue.following import Following
from tests.service.boxes import a_record


def follower(box: Backing) -> tuple[ActiveJobs, Following]:
    """Return active jobs, and what follows changes for them, begun."""
    jobs = ActiveJobs(half_life_s=60.0, clock=time.time)
    found = Following(jobs, records=box.records, usage=box.usage)
    found.begin()
    return jobs, found


def told(record: JobRecord) -> list[Change]:
    return [Change(record.id, "state", record.state.final, record)]


def test_what_is_known_already_is_nothing_new(backing: Backing) -> None:
    _, following = follower(backing)
    assert following.note("1-0", told(a_record())).jobs
    assert not following.note("2-0", told(a_record())).jobs


def test_an_older_record_does_not_take_the_place_of_a_newer(backing: Backing) -> None:
    queued = a_record()
    running = queued.begin(worker="w", now_s=2.0)
    assert running is not None
    again = running.requeue(attempt=1, reason="lost", now_s=3.0)
    assert again is not None
    jobs, following = follower(backing)
    for record in (again, running, queued):
        following.note("1-0", told(record))
    assert jobs.queued("job1") == again
    assert not jobs.running


def test_the_end_of_a_job_is_not_undone_by_what_came_before(backing: Backing) -> None:
    queued = a_record(created_s=time.time())
    over = queued.request_cancel(now_s=time.time() + 1.0)
    assert over is not None
    jobs, following = follower(backing)
    for record in (queued, over, queued):
        following.note("1-0", told(record))
    assert jobs.snapshot() == ([], [])
