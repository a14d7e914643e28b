"""Server-sent events: complete, resumable, and ended by the final state."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import redis

from gradbox.protocol import OperationMode, OperationView
from gradbox_service.jobs import JobRecord
from tests.service.boxes import advance, begin, events_of, finish, run_job, submit
from tests.service.conftest import Box

TRIES = 100
PAUSE_S = 0.02


def read(box: Box, job_id: str, **headers: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Read a stream until the service ends it."""
    with box.client.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events_of(list(answer.iter_lines()))


def without_positions(events: list[tuple[str, str, dict[str, Any]]]) -> list[str]:
    """Name the events, those left out that only tell a new place in the queue."""
    return [
        data.get("state", kind) for _, kind, data in events if data.get("queue_position") is None
    ]


def test_a_stream_ends_with_the_final_state(box: Box) -> None:
    job_id = submit(box.client)
    run_job(box.backing, job_id, data=b"x")
    events = read(box, job_id)
    assert without_positions(events) == ["queued", "running", "progress", "done"]
    assert events[-1][2]["result"]["size_bytes"] == 1


def test_events_arrive_while_the_job_runs(box: Box) -> None:
    job_id = submit(box.client)
    seen: list[tuple[float, str]] = []
    told: list[float] = []
    started = threading.Event()

    def work() -> None:
        started.wait()
        attempt = begin(box.backing.records, job_id).attempt
        for done in (1, 2):
            time.sleep(0.1)
            told.append(time.monotonic())
            advance(box.backing.records, job_id, attempt=attempt, done=done)
        finish(box.backing, job_id, attempt=attempt, data=b"x")

    worker = threading.Thread(target=work)
    worker.start()
    with box.client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        for line in answer.iter_lines():
            if line.startswith("event:"):
                seen.append((time.monotonic(), line))
                started.set()
    worker.join()
    progress = [at for at, line in seen if line == "event: progress"]
    assert len(progress) == 2
    assert progress[1] > told[1]


def test_a_stream_resumes_behind_an_event(box: Box) -> None:
    job_id = submit(box.client)
    run_job(box.backing, job_id, data=b"x")
    events = read(box, job_id)
    for index, (event_id, _, _) in enumerate(events):
        assert read(box, job_id, **{"Last-Event-ID": event_id}) == events[index + 1 :]


def test_a_listener_that_reconnects_misses_nothing(box: Box) -> None:
    job_id = submit(box.client)
    attempt = begin(box.backing.records, job_id).attempt
    with box.client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        lines = answer.iter_lines()
        head = [next(lines)]
        while head[-1] or "running" not in "".join(head):
            head.append(next(lines))
    advance(box.backing.records, job_id, attempt=attempt, done=1)
    finish(box.backing, job_id, attempt=attempt, data=b"x")
    last = events_of(head)[-1][0]
    rest = read(box, job_id, **{"Last-Event-ID": last})
    heard = dict.fromkeys(without_positions(events_of(head) + rest))  # that it runs perhaps twice
    assert list(heard) == ["queued", "running", "progress", "done"]


def handed_out_at_once(box: Box) -> str:
    """Submit jobs until one finds the worker idle: the dispatcher hears of it in its own time."""
    for _ in range(TRIES):
        job_id = submit(box.client)
        record = box.backing.records.get(job_id)
        assert record is not None
        if record.unsaid:
            return job_id
        run_job(box.backing, job_id, data=b"x")
        time.sleep(PAUSE_S)
    raise AssertionError("no job was handed out at once")


def test_a_short_job_that_was_handed_out_at_once_has_its_post_and_its_end(box: Box) -> None:
    job_id = handed_out_at_once(box)
    finish(box.backing, job_id, attempt=begin(box.backing.records, job_id).attempt, data=b"x")
    events = read(box, job_id)
    assert [(data["state"], data["result"] is None) for _, _, data in events] == [
        ("queued", True),
        ("done", False),
    ]


def test_a_job_that_was_handed_out_at_once_runs_once_its_worker_looks(box: Box) -> None:
    job_id = submit(box.client)
    attempt = begin(box.backing.records, job_id).attempt
    seen: list[str] = []
    with box.client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        box.backing.records.update(job_id, partial(JobRecord.say_running, attempt=attempt))
        finish(box.backing, job_id, attempt=attempt, data=b"x")
        seen = without_positions(events_of(list(answer.iter_lines())))
    assert list(dict.fromkeys(seen)) == ["queued", "running", "done"]
    assert without_positions(read(box, job_id)) == ["queued", "running", "done"]


def test_who_listens_is_told_of_another_place(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradbox_service.http.event_hub.POSITION_S", 0.05)
    box.backing.operation.set(OperationView(mode=OperationMode.PAUSED))
    job_id = submit(box.client)
    lines: list[str] = []
    with box.client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if not line and (place := events_of(lines)[-1][2].get("queue_position")) is not None:
                break
    assert place == 1


def test_an_id_from_elsewhere_reads_from_the_beginning(box: Box) -> None:
    job_id = submit(box.client)
    run_job(box.backing, job_id, data=b"x")
    assert read(box, job_id, **{"Last-Event-ID": "nonsense"}) == read(box, job_id)


def test_a_cancelled_job_ends_its_stream(box: Box) -> None:
    job_id = submit(box.client)
    timer = threading.Timer(0.1, lambda: box.client.delete(f"/v1/jobs/{job_id}"))
    timer.start()
    assert read(box, job_id)[-1][2]["state"] == "cancelled"
    timer.join()


def test_a_revoked_token_is_told_no_more(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradbox_service.http.auth.LOOK_S", 0.0)
    client = box.client_of("bob")
    job_id = submit(client)
    lines: list[str] = []
    with client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        for line in answer.iter_lines():
            if not lines:
                box.backing.tokens.revoke("bob")
                run_job(box.backing, job_id, data=b"x")
            lines.append(line)
    assert "done" not in [event[2].get("state") for event in events_of(lines)]


def test_a_quiet_stream_is_kept_alive(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastapi.routing._PING_INTERVAL", 0.05)
    job_id = submit(box.client)
    with box.client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        assert ": ping" in answer.iter_lines()


def test_many_listeners_take_few_connections(box: Box, connection: redis.Redis) -> None:
    job_ids = [submit(box.client) for _ in range(3)]
    before = len(connection.client_list())
    with ThreadPoolExecutor(60) as pool:
        streams = [pool.submit(read, box, job_id) for job_id in job_ids for _ in range(20)]
        time.sleep(0.5)
        during = len(connection.client_list())
        for job_id in job_ids:
            box.backing.records.update(job_id, partial(JobRecord.request_cancel, now_s=1.0))
        found = [stream.result() for stream in streams]
    assert all(events[-1][2]["state"] == "cancelled" for events in found)
    # Reads are short and go through a pool of 40 threads, none of which is held by a listener.
    assert during - before < len(streams)
