"""Changes that one reader of a process passes on to another, and what is made of them."""

from __future__ import annotations

import threading
import time

from gradbox_service.backing import Backing
from gradbox_service.jobs import Change, JobRecord
from gradbox_service.jobs.changes import MAX_CHANGES
from gradbox_service.queue.active_jobs import ActiveJobs
from gradbox_service.queue.following import Following, PassedChanges, ReadChanges
from tests.service.boxes import a_record


def change(number: int) -> Change:
    return Change(f"job{number}", "state")


def test_what_was_passed_on_is_taken_once_and_in_order() -> None:
    passed = PassedChanges()
    passed.pass_on("1-0", [change(1)])
    passed.pass_on("3-0", [change(2), change(3)])
    cursor, taken = passed.changes("0-0", wait_s=0.0)
    assert (cursor, list(taken)) == ("3-0", [change(1), change(2), change(3)])
    assert passed.changes(cursor, wait_s=0.0) == ("3-0", [])


def test_who_begins_to_take_reads_from_now_on() -> None:
    passed = PassedChanges()
    passed.pass_on("1-0", [change(1)])
    cursor, taken = passed.changes(None, wait_s=0.0)
    passed.pass_on("2-0", [change(2)])
    assert list(taken) == []
    assert passed.changes(cursor, wait_s=0.0) == ("2-0", [change(2)])


def test_a_change_ends_the_wait_for_it() -> None:
    passed = PassedChanges()
    cursor, _ = passed.changes(None, wait_s=0.0)
    later = threading.Timer(0.05, passed.pass_on, ("1-0", [change(1)]))
    later.start()
    assert passed.changes(cursor, wait_s=60.0) == ("1-0", [change(1)])
    later.join()


def test_a_posted_job_is_told_before_its_change_is_read() -> None:
    passed, record = PassedChanges(), a_record()
    passed.changes(None, wait_s=0.0)
    passed.note_posted(record)
    assert passed.changes("0-0", wait_s=0.0) == ("0-0", [Change("job1", "state", record=record)])


def following(box: Backing, changes: ReadChanges) -> tuple[ActiveJobs, Following]:
    """Return active jobs, and what follows these changes for them, begun."""
    jobs = ActiveJobs(half_life_s=60.0, clock=time.time)
    found = Following(jobs, records=box.records, usage=box.usage, changes=changes)
    found.begin()
    return jobs, found


def reading(box: Backing, *told: JobRecord) -> tuple[ActiveJobs, Following]:
    """Return the active jobs of a stream that tells these records, one at a read."""
    left = [Change(record.id, "state", record.state.final, record) for record in told]

    def changes(after: str | None, *, wait_s: float) -> tuple[str, list[Change]]:
        return "0-0", [] if after is None else [left.pop(0)]

    return following(box, changes)


def test_what_is_known_already_is_nothing_new(backing: Backing) -> None:
    _, follower = reading(backing, a_record(), a_record())
    assert follower.sync().jobs
    assert not follower.sync().jobs


def test_an_older_record_does_not_take_the_place_of_a_newer(backing: Backing) -> None:
    queued = a_record()
    running = queued.begin(worker="w", now_s=2.0)
    assert running is not None
    again = running.requeue(attempt=1, reason="lost", now_s=3.0)
    assert again is not None
    jobs, follower = reading(backing, again, running, queued)
    for _ in range(3):
        follower.sync()
    assert jobs.queued("job1") == again
    assert not jobs.running


def test_a_job_told_late_by_who_took_it_does_not_hide_that_it_runs(backing: Backing) -> None:
    passed = PassedChanges()
    jobs, follower = following(backing, passed.changes)
    queued = a_record()
    running = queued.begin(worker="w", now_s=2.0)
    passed.pass_on("2-0", [Change("job1", "state", record=running)])
    passed.note_posted(queued)
    follower.sync()
    assert list(jobs.running) == [running]


def test_the_end_of_a_job_is_not_undone_by_what_came_before(backing: Backing) -> None:
    queued = a_record(created_s=time.time())
    over = queued.request_cancel(now_s=time.time() + 1.0)
    assert over is not None
    jobs, follower = reading(backing, queued, over, queued)
    for _ in range(3):
        follower.sync()
    assert jobs.snapshot() == ([], [])


def test_more_than_anybody_takes_is_told_as_missed() -> None:
    passed = PassedChanges()
    passed.pass_on("9-0", [change(number) for number in range(MAX_CHANGES + 1)])
    assert passed.changes("0-0", wait_s=0.0) == ("9-0", [Change("", "missed")])
