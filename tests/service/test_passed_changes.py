"""Changes that one reader of a process passes on to another."""

from __future__ import annotations

import threading

from gradbox_service.jobs import Change
from gradbox_service.jobs.redis_changes import MAX_CHANGES
from gradbox_service.queue.passed_changes import PassedChanges


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


def test_more_than_anybody_takes_is_told_as_missed() -> None:
    passed = PassedChanges()
    passed.pass_on("9-0", [change(number) for number in range(MAX_CHANGES + 1)])
    assert passed.changes("0-0", wait_s=0.0) == ("9-0", [Change("", "missed")])
