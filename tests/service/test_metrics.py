"""What a box says to those who watch it."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path

import httpx
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from gradbox.printable import JsonFormatter
from gradbox.protocol import DeviceMemory, Problem
from gradbox_service.backing import Backing
from gradbox_service.fleet import WorkerPresence
from gradbox_service.jobs import JobRecord
from gradbox_service.settings import Settings
from gradbox_service.watching import scrape
from tests.service.boxes import begin, run_job, submit
from tests.service.conftest import Box, client_with, serve
from tests.service.test_runs import a_run, step

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana.json"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def owner(box: Box) -> httpx.Client:
    return client_with(box.transport, box.backing.tokens.create("root", admin=True))


def samples(client: httpx.Client) -> Samples:
    text = client.get("/metrics").raise_for_status().text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def until(client: httpx.Client, name: str, value: float, /, **labels: str) -> Samples:
    """Scrape until a sample has a value; the dispatcher reads changes a moment later."""
    give_up = time.monotonic() + 60.0
    while True:
        found = samples(client)
        if found.get((name, tuple(sorted(labels.items())))) == value:
            return found
        assert time.monotonic() < give_up, found
        time.sleep(0.05)


def end_one_of_each(box: Box, owner: httpx.Client) -> None:
    """One job done, one failed after a second on its device, one that waits; a device's memory.

    None begins before the dispatcher has read that it waits, as on a box whose turns it feeds.
    """
    submit(box.client, seed=2)
    memory = DeviceMemory(total_bytes=100, used_bytes=60, models={"tiny": 40}, job_bytes=5)
    worker = WorkerPresence(name="worker-2", device="cpu", state="busy", memory=memory)
    box.backing.fleet.announce(worker, ttl_s=600.0)
    done, failed = (submit(box.client, seed=seed) for seed in range(2))
    until(owner, "gradbox_queued_jobs", 3, user="ann")
    run_job(box.backing, done, data=b"12345")
    problem = Problem(
        type="urn:gradbox:problem:out-of-memory", title="t", status=422, detail="d", category="user"
    )
    attempt = begin(box.backing.records, failed).attempt
    ended_s = time.time() + 1.0
    box.backing.records.update(
        failed, lambda r: JobRecord.fail(r, attempt=attempt, error=problem, now_s=ended_s)
    )


def test_jobs_are_counted_by_how_they_ended(box: Box, owner: httpx.Client) -> None:
    end_one_of_each(box, owner)
    found = until(owner, "gradbox_jobs_total", 1, computation="gradient", state="failed")
    assert found["gradbox_jobs_total", (("computation", "gradient"), ("state", "done"))] == 1
    assert found["gradbox_job_failures_total", (("reason", "out-of-memory"),)] == 1
    assert found["gradbox_job_run_seconds_count", (("computation", "gradient"),)] == 2
    assert found["gradbox_job_wait_seconds_count", (("user", "ann"),)] == 2
    assert found["gradbox_job_result_bytes_total", (("user", "ann"),)] == 5
    assert found["gradbox_queued_jobs", (("user", "ann"),)] == 1
    used = (
        "gradbox_device_memory_bytes",
        (("device", "cpu"), ("kind", "used"), ("worker", "worker-2")),
    )
    assert found[used] == 60
    assert (
        found[
            "gradbox_http_requests_total",
            (("method", "POST"), ("route", "/v1/jobs"), ("status", "202")),
        ]
        == 3
    )


def test_every_metric_of_the_grafana_dashboard_is_there(box: Box, owner: httpx.Client) -> None:
    end_one_of_each(box, owner)
    begin(box.backing.records, submit(box.client, seed=9), lease_s=600.0)
    step(box, a_run(box.client), 1)
    until(owner, "gradbox_jobs_total", 1, computation="gradient", state="failed")
    found = until(owner, "gradbox_running_jobs", 1, user="ann")
    panels = json.loads(GRAFANA.read_text())["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"\bgradbox_\w+", target["expr"])
    }
    assert len(asked) > 15
    assert asked - {name for name, _ in found} == set()


def test_runs_that_made_a_step_lately_say_how_far_they_are(
    box: Box, owner: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(box.client, name="idle")
    runs = [a_run(box.client, name=name) for name in ("first", "second")]
    for run in runs:
        step(box, run, 1)
    step(box, runs[0], 2)
    of = {"user": "ann", "run": runs[0]["id"], "name": "first"}
    found = until(owner, "gradbox_run_steps_total", 2, **of)
    labels = tuple(sorted(of.items()))
    assert found["gradbox_run_loss", labels] == 0.5
    assert found["gradbox_run_grad_norm", labels] == 2.0
    assert found["gradbox_run_step_seconds", labels] >= 0
    assert len([1 for name, _ in found if name == "gradbox_run_steps_total"]) == 2
    monkeypatch.setattr(scrape, "MAX_RUNS", 1)
    (only,) = [dict(of) for name, of in samples(owner) if name == "gradbox_run_loss"]
    assert only["name"] == "first"
    monkeypatch.setattr(scrape, "RUNS_SHOWN_S", -1.0)
    assert not [name for name, _ in samples(owner) if name.startswith("gradbox_run_")]


def test_room_and_whether_jobs_are_taken_are_told(box: Box, owner: httpx.Client) -> None:
    found = samples(owner)
    assert found["gradbox_disk_free_bytes", ()] > 0
    assert found["gradbox_disk_reserve_bytes", ()] >= 2**30
    assert found["gradbox_takes_jobs", ()] == 1
    owner.put("/v1/operation", json={"mode": "draining"}).raise_for_status()
    assert samples(owner)["gradbox_takes_jobs", ()] == 0


def test_a_redis_near_its_bound_takes_no_jobs(
    redis_settings: Settings, connection: redis.Redis
) -> None:
    for box in serve(Backing.on_redis(redis_settings), redis_settings):
        owner = client_with(box.transport, box.backing.tokens.create("root", admin=True))
        assert ("gradbox_redis_memory_bound_bytes", ()) not in samples(owner)
        bound_bytes = int(1.1 * box.backing.records.memory().used_bytes)
        connection.config_set("maxmemory", bound_bytes)
        try:
            found = samples(owner)
        finally:
            connection.config_set("maxmemory", 0)
        assert found["gradbox_redis_memory_bound_bytes", ()] == bound_bytes
        assert found["gradbox_takes_jobs", ()] == 0


def test_metrics_are_for_the_owner_alone(box: Box) -> None:
    assert box.client.get("/metrics").status_code == 403
    assert client_with(box.transport, "no").get("/metrics").status_code == 401


def test_a_job_and_a_request_take_one_line_each(
    box: Box, owner: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    end_one_of_each(box, owner)
    until(owner, "gradbox_jobs_total", 1, computation="gradient", state="failed")
    refused = box.client.post("/v1/jobs", json={"nonsense": 1})
    assert refused.status_code == 422
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    (failed,) = [line for line in lines if line.get("state") == "failed"]
    assert failed["level"] == "INFO"
    assert (failed["user"], failed["error"], failed["attempts"]) == ("ann", "out-of-memory", 1)
    (mistake,) = [line for line in lines if line.get("status") == 422]
    assert mistake["level"] == "INFO"
    assert (mistake["path"], mistake["problem"]) == ("/v1/jobs", "invalid-job")
    assert mistake["request"] == refused.headers["X-Request-ID"]
    assert not [line for line in lines if "exception" in line]
    assert not [line for line in lines if line.get("path") == "/metrics"]
