"""Jobs over HTTP, from post to cancel."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from gradbox.errors import WorkerLost
from gradbox.protocol import JobView, Problem
from gradbox_service.backing import Backing
from gradbox_service.http.app import create_app
from gradbox_service.jobs import JobRecord
from gradbox_service.settings import Settings
from tests.inprocess import InProcessTransport
from tests.service.boxes import SHARDS, announce, begin, run_job, spec_for, submit, upload
from tests.service.conftest import Box, client_with, serve
from tests.valkey import empty_backing


def test_the_default_of_timeout_s_is_cut_to_the_limit_of_the_box(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path / "data", max_timeout_s=100.0)
    for box in serve(empty_backing(tmp_path / "data"), settings):
        record = box.backing.records.get(submit(box.client))
        assert record is not None
        assert record.timeout_s == 100.0
        blob = upload(box.client, SHARDS)
        answer = box.client.post("/v1/jobs", json=spec_for(blob, timeout_s=101.0))
        assert answer.status_code == 422
        assert "expected at most 100, which is this box's limit" in answer.json()["detail"]


def test_a_posted_job_is_queued_and_fed(box: Box) -> None:
    job_id = submit(box.client, name="mine", priority=-3)
    view = JobView.model_validate(box.client.get(f"/v1/jobs/{job_id}").json())
    assert (view.state, view.owner, view.name, view.priority) == ("queued", "ann", "mine", -3)
    give_up = time.monotonic() + 60.0
    while not box.backing.turns.waiting() and time.monotonic() < give_up:
        time.sleep(0.01)
    assert [turn.job_id for turn in box.backing.turns.waiting()] == [job_id]
    while time.monotonic() < give_up:
        view = JobView.model_validate(box.client.get(f"/v1/jobs/{job_id}").json())
        if view.queue_position is not None:
            break
        time.sleep(0.05)
    assert (view.queue_position, view.waiting_for) == (1, {})


def test_the_record_pins_the_version_and_keeps_the_spec(box: Box) -> None:
    job_id = submit(box.client, model="tiny@a1a1a1a1", seed=5, timeout_s=9.0)
    record, spec = box.backing.records.get(job_id), box.backing.records.spec(job_id)
    assert record is not None
    assert spec is not None
    assert (record.model, record.model_version) == ("tiny", "a1" * 32)
    assert record.timeout_s == 9.0
    assert (spec.model, spec.seed) == ("tiny@a1a1a1a1", 5)


def test_the_same_key_and_body_give_the_same_job(box: Box) -> None:
    spec = spec_for(upload(box.client, SHARDS))
    headers = {"Idempotency-Key": "once"}

    def post(_: int) -> str:
        answer = box.client.post("/v1/jobs", json=spec, headers=headers)
        assert answer.status_code == 202
        return str(answer.json()["id"])

    with ThreadPoolExecutor(20) as pool:
        assert len(set(pool.map(post, range(20)))) == 1
    assert len(box.client.get("/v1/jobs").json()["jobs"]) == 1


def test_the_same_key_and_another_body_are_a_conflict(box: Box) -> None:
    blob = upload(box.client, SHARDS)
    headers = {"Idempotency-Key": "once"}
    assert box.client.post("/v1/jobs", json=spec_for(blob), headers=headers).status_code == 202
    again = box.client.post("/v1/jobs", json=spec_for(blob, seed=1), headers=headers)
    assert again.status_code == 422
    assert again.json()["type"].endswith("idempotency-conflict")


@pytest.mark.parametrize("key", ["", "k" * 201])
def test_a_key_that_is_none_is_refused(small_box: Box, key: str) -> None:
    spec = spec_for(upload(small_box.client, SHARDS))
    answer = small_box.client.post("/v1/jobs", json=spec, headers={"Idempotency-Key": key})
    assert answer.status_code == 422
    assert answer.json()["type"].endswith("invalid-request")
    assert "idempotency-key" in answer.json()["detail"]


@pytest.mark.parametrize("size_bytes", [100, 200_000])
def test_nobody_posts_without_a_token(small_box: Box, size_bytes: int) -> None:
    headers = {"Authorization": "Bearer nobody"}
    answer = small_box.client.post("/v1/jobs", content=b" " * size_bytes, headers=headers)
    assert answer.status_code == 401


def test_a_repeated_post_is_answered_though_the_model_has_gone(small_box: Box) -> None:
    spec = spec_for(upload(small_box.client, SHARDS))
    headers = {"Idempotency-Key": "once"}
    first = small_box.client.post("/v1/jobs", json=spec, headers=headers)
    small_box.backing.fleet.retire("worker-1")
    second = small_box.client.post("/v1/jobs", json=spec, headers=headers)
    assert second.json()["id"] == first.json()["id"]
    assert small_box.client.post("/v1/jobs", json=spec).status_code == 503


def test_without_a_key_every_post_is_a_job(small_box: Box) -> None:
    assert submit(small_box.client) != submit(small_box.client)


def test_jobs_are_listed_newest_first(box: Box) -> None:
    ids = [submit(box.client) for _ in range(3)]
    begin(box.backing.records, ids[1])
    jobs = box.client.get("/v1/jobs").json()["jobs"]
    assert [job["id"] for job in jobs] == ids[::-1]
    running = box.client.get("/v1/jobs", params={"state": "running"}).json()["jobs"]
    assert [job["id"] for job in running] == [ids[1]]
    assert len(box.client.get("/v1/jobs", params={"limit": 2}).json()["jobs"]) == 2
    assert box.client.get("/v1/jobs", params={"limit": 0}).status_code == 422
    assert box.client.get("/v1/jobs", params={"state": "lost"}).status_code == 422


def test_somebody_elses_job_reads_as_none(box: Box) -> None:
    job_id = submit(box.client)
    run_job(box.backing, job_id, data=b"x")
    bob = box.client_of("bob")
    calls = [
        bob.get(f"/v1/jobs/{job_id}"),
        bob.delete(f"/v1/jobs/{job_id}"),
        bob.get(f"/v1/jobs/{job_id}/events"),
        bob.get(f"/v1/jobs/{job_id}/result"),
    ]
    unknown = bob.get("/v1/jobs/nope").json()
    for answer in calls:
        assert answer.status_code == 404
        problem = answer.json()
        assert problem["type"] == unknown["type"] == "urn:gradbox:problem:job-not-found"
        assert problem["detail"].replace(job_id, "nope") == unknown["detail"]
    assert bob.get("/v1/jobs").json() == {"jobs": [], "next": None}


def test_a_waiting_job_is_cancelled_at_once(box: Box) -> None:
    job_id = submit(box.client)
    answer = box.client.delete(f"/v1/jobs/{job_id}")
    assert (answer.status_code, answer.json()["state"]) == (202, "cancelled")
    again = box.client.delete(f"/v1/jobs/{job_id}")
    assert (again.status_code, again.json()["state"]) == (202, "cancelled")
    assert again.json()["finished_s"] == answer.json()["finished_s"]


def test_a_running_job_is_asked_to_stop(box: Box) -> None:
    job_id = submit(box.client)
    attempt = begin(box.backing.records, job_id).attempt
    answer = box.client.delete(f"/v1/jobs/{job_id}").json()
    assert (answer["state"], answer["cancel_requested"]) == ("running", True)
    record = box.backing.records.beat(job_id, attempt=attempt, lease_s=1.0)
    assert record is not None
    assert record.cancel_requested


def test_a_failed_job_carries_its_problem(box: Box) -> None:
    job_id = submit(box.client)
    attempt = begin(box.backing.records, job_id).attempt
    problem = Problem.of(WorkerLost("the machine burnt down"))
    box.backing.records.update(
        job_id, partial(JobRecord.fail, attempt=attempt, error=problem, now_s=time.time())
    )
    view = JobView.model_validate(box.client.get(f"/v1/jobs/{job_id}").json())
    assert view.error is not None
    assert isinstance(view.error.error(), WorkerLost)
    assert "burnt down" in view.error.detail


def test_models_are_listed_and_looked_up(box: Box) -> None:
    (model,) = box.client.get("/v1/models").json()["models"]
    assert model == box.client.get("/v1/models/tiny").json()
    assert model == box.client.get("/v1/models/tiny@a1a1a1a1").json()
    assert model["methods"]["forward"]["arguments"] == ["x", "mask"]
    unknown = box.client.get("/v1/models/nope")
    assert unknown.json()["type"].endswith("unknown-model")


def test_a_box_is_ready_once_a_worker_has_described_its_models(box: Box) -> None:
    assert box.client.get("/readyz").json() == {
        "ready": True,
        "builds": "",
        "workers": 1,
        "models": ["tiny"],
        "mode": "running",
        "reason": "",
        "refuses": "",
    }
    assert box.client.get("/livez").json() == {"live": True}
    box.backing.fleet.retire("worker-1")
    assert box.client.get("/readyz").status_code == 503
    assert box.client.get("/livez").status_code == 200


@pytest.mark.parametrize("thread", ["dispatcher", "cleaner"])
def test_a_service_without_one_of_its_threads_is_not_ready(
    backing: Backing, tmp_path: Path, thread: str
) -> None:
    announce(backing)
    app = create_app(Settings(data=tmp_path / "data"), backing=backing)
    with InProcessTransport(app) as transport:
        client = client_with(transport, "")
        assert client.get("/readyz").status_code == 200
        ended = getattr(app.state, thread)
        ended.close()
        backing.records.wake()
        ended.join()
        assert client.get("/readyz").status_code == 503
        assert client.get("/livez").status_code == 500


def test_jobs_are_listed_in_pages(box: Box) -> None:
    ids = [submit(box.client, seed=seed) for seed in range(5)][::-1]
    pages, query = [], {"limit": 2}
    while True:
        page = box.client.get("/v1/jobs", params=query).json()
        pages.append([job["id"] for job in page["jobs"]])
        if page["next"] is None:
            break
        query = {"limit": 2, "cursor": page["next"]}
    assert pages == [ids[:2], ids[2:4], ids[4:]]


@pytest.mark.parametrize("cursor", ["nonsense", "nan_a", "inf_a", "1e999_a"])
def test_a_cursor_that_is_none_is_refused(box: Box, cursor: str) -> None:
    refused = box.client.get("/v1/jobs", params={"cursor": cursor})
    assert (refused.status_code, "cursor" in refused.json()["detail"]) == (422, True)
