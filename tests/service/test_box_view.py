"""What everybody, an owner and the box's owner see of the box, at once and as it changes."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest
from safetensors.numpy import save

from gradbox.protocol import BoxView, DeviceMemory, UsageView
from gradbox_service.dashboard.picture import MAX_WAITING
from gradbox_service.fleet import WorkerPresence
from gradbox_service.jobs import QueuePosition
from tests.service.boxes import (
    MODEL,
    SHARDS,
    a_record,
    a_spec,
    advance,
    begin,
    blob_of,
    finish,
    ones,
    run_job,
    submit,
    upload,
)
from tests.service.conftest import Box, client_with
from tests.service.test_sessions import log_in

MEMORY = DeviceMemory(total_bytes=100, used_bytes=40, models={"tiny": 30}, job_bytes=5)


def owner_of(box: Box) -> httpx.Client:
    return client_with(box.transport, box.backing.tokens.create("root", admin=True))


def seen(client: httpx.Client) -> BoxView:
    answer = client.get("/v1/box")
    assert answer.status_code == 200, answer.text
    return BoxView.model_validate(answer.json())


class Stream:
    """An open event stream, read in a thread; it ends with the box's app."""

    def __init__(self, client: httpx.Client) -> None:
        self.events: list[tuple[str, str]] = []
        self.ended = threading.Event()
        self._client = client
        threading.Thread(target=self._read, daemon=True).start()
        self.wait(lambda: len(self.events) > 0)

    def _read(self) -> None:
        with self._client.stream("GET", "/v1/box/events", timeout=60) as answer:
            kind = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    self.events.append((kind, line.removeprefix("data: ")))
        self.ended.set()

    def wait(self, condition: Any) -> None:
        deadline = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < deadline, self.events[-3:]
            time.sleep(0.01)

    @property
    def views(self) -> list[BoxView]:
        assert {kind for kind, _ in self.events} == {"box"}
        return [BoxView.model_validate_json(text) for _, text in self.events]


def test_others_see_whose_job_waits_but_not_which(box: Box) -> None:
    job_id = submit(box.client, name="secret plan")
    (own,) = seen(box.client).jobs
    (others,) = seen(box.client_of("bob")).jobs
    (admins,) = seen(owner_of(box)).jobs
    assert (own.id, own.name, own.position) == (job_id, "secret plan", 1)
    assert admins == own
    assert (others.id, others.name) == (None, None)
    assert (others.owner, others.model, others.computation) == ("ann", "tiny", "gradient")
    assert "secret" not in box.client_of("eve").get("/v1/box").text
    assert job_id not in box.client_of("eve").get("/v1/box").text


def test_nobody_sees_anything_without_a_token(small_box: Box) -> None:
    client = client_with(small_box.transport, "gbx_no")
    for path in ("/v1/box", "/v1/box/events", "/v1/usage"):
        assert client.get(path).status_code == 401


def test_what_runs_stands_before_what_waits(box: Box) -> None:
    first, second, third = (submit(box.client, seed=seed) for seed in range(3))
    begin(box.backing.records, second)
    box.backing.records.set_positions({first: QueuePosition(1), third: QueuePosition(2)})
    view = seen(box.client)
    assert [(job.id, job.position) for job in view.jobs] == [(second, None), (first, 1), (third, 2)]
    assert (view.num_running, view.num_queued) == (1, 2)


def test_a_device_shows_its_memory_and_the_job_it_holds(box: Box) -> None:
    job_id = submit(box.client)
    begin(box.backing.records, job_id)
    presence = WorkerPresence(
        name="worker-1",
        device="cuda:0",
        hardware="H100",
        state="busy",
        models={MODEL.name: MODEL.version},
        job=job_id,
        memory=MEMORY,
    )
    box.backing.fleet.announce(presence, ttl_s=60)
    view = seen(box.client_of("bob"))
    (device,) = view.devices
    assert device.memory == MEMORY
    assert device.job == view.jobs[0].key
    assert device.hardware == "H100"
    assert view.models[0].loaded == ["worker-1"]


def test_a_pause_is_seen_by_all_and_sent_to_those_who_look(box: Box) -> None:
    stream = Stream(box.client_of("bob"))
    owner_of(box).put("/v1/operation", json={"mode": "paused", "reason": "new driver"})
    stream.wait(lambda: str(stream.views[-1].operation) == "paused by root: new driver")
    assert seen(box.client).operation == stream.views[-1].operation


def test_what_waits_shows_when_it_begins(small_box: Box) -> None:
    first, second = (submit(small_box.client, seed=seed) for seed in range(2))
    begins_s = time.time() + 50.0
    small_box.backing.records.set_positions(
        {first: QueuePosition(1, {}, begins_s), second: QueuePosition(2)}
    )
    view = seen(small_box.client)
    assert [job.begins_s for job in view.jobs] == [begins_s, None]


def test_the_last_hour_shows_when_a_device_was_busy(box: Box) -> None:
    now_s = time.time()
    box.backing.records.create(a_record("one"), spec=a_spec())
    box.backing.records.update("one", lambda r: r.begin(worker="worker-1", now_s=now_s - 600))
    (device,) = seen(box.client).devices
    assert len(device.busy) == 60
    assert device.busy[-5:-1] == [100] * 4
    assert device.busy[:40] == [0] * 40
    assert device.busy_share == pytest.approx(600 / 3570, rel=0.05)


def test_a_model_shows_its_signature(box: Box) -> None:
    (model,) = seen(box.client).models
    assert model.methods["forward"].arguments == ["x", "mask"]
    assert (model.num_parameters, model.usable, model.workers) == (6, True, ["worker-1"])
    assert 'model="tiny"' in model.program


def test_a_stream_tells_a_job_from_its_post_to_its_end(box: Box) -> None:
    stream = Stream(box.client)
    job_id = submit(box.client)
    stream.wait(lambda: stream.views[-1].num_queued == 1)
    attempt = begin(box.backing.records, job_id).attempt
    advance(box.backing.records, job_id, attempt=attempt, done=1)
    stream.wait(lambda: any(job.progress for job in stream.views[-1].jobs))
    finish(box.backing, job_id, attempt=attempt, data=b"x")
    stream.wait(lambda: not stream.views[-1].jobs)
    assert stream.views[-1].num_running == 0


def test_a_stream_ends_when_its_token_is_revoked(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradbox_service.dashboard.board.REREAD_S", 0.2)
    stream = Stream(box.client_of("bob"))
    box.backing.tokens.revoke("bob")
    assert stream.ended.wait(60)


def test_streams_tell_others_no_names(box: Box) -> None:
    stream = Stream(box.client_of("bob"))
    job_id = submit(box.client, name="secret plan")
    stream.wait(lambda: stream.views[-1].jobs)
    said = json.dumps(stream.events)
    assert "secret" not in said
    assert job_id not in said


def test_of_many_jobs_the_first_hundred_are_sent(box: Box) -> None:
    stream = Stream(box.client)
    ids = [f"job{number:04}" for number in range(300)]
    for job_id in ids:
        box.backing.records.create(a_record(job_id, name="n" * 60), spec=a_spec())
    box.backing.records.set_positions({job: QueuePosition(n) for n, job in enumerate(ids, start=1)})
    begin(box.backing.records, ids[0])
    stream.wait(lambda: (stream.views[-1].num_running, stream.views[-1].num_queued) == (1, 299))
    assert len(stream.views[-1].jobs) == MAX_WAITING + 1
    assert len(stream.events[-1][1]) < 60_000


def test_an_open_page_ends_with_its_session(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradbox_service.http.auth.LOOK_S", 0.0)
    window = log_in(box, "bob")
    stream, other = Stream(window), Stream(log_in(box, "bob"))
    by_token = Stream(box.client)
    assert window.delete("/v1/session").status_code == 204
    submit(box.client)
    assert stream.ended.wait(30.0)
    other.wait(lambda: other.views[-1].jobs)
    by_token.wait(lambda: by_token.views[-1].jobs)
    assert [found.ended.is_set() for found in (stream, other, by_token)] == [True, False, False]
    assert stream.views[-1].jobs == []


def test_use_is_told_by_name_to_the_boxs_owner_alone(box: Box) -> None:
    for client in (box.client, box.client_of("bob"), box.client_of("eve")):
        run_job(box.backing, submit(client), data=b"12345")

    def used(client: httpx.Client, span: str) -> dict[str | None, tuple[int, int]]:
        view = UsageView.model_validate(client.get("/v1/usage", params={"span": span}).json())
        assert all(sum(line.result_bytes_by_bucket) == line.result_bytes for line in view.owners)
        return {line.owner: (line.num_jobs, line.result_bytes) for line in view.owners}

    for span in ("day", "week", "month"):
        assert used(owner_of(box), span) == {"ann": (1, 5), "bob": (1, 5), "eve": (1, 5)}
        assert used(box.client, span) == {"ann": (1, 5), None: (2, 10)}
    assert box.client.get("/v1/usage", params={"span": "year"}).status_code == 422


def test_what_is_kept_is_told_of_those_who_used_nothing_lately_too(small_box: Box) -> None:
    run_job(small_box.backing, submit(small_box.client), data=b"12345")
    bob, eve = small_box.client_of("bob"), small_box.client_of("eve")
    bobs, eves = (len(blob_of({"x": ones(n)})[1]) for n in (3, 4))
    upload(bob, {"x": ones(3)})
    upload(eve, {"x": ones(4)})

    def kept(client: httpx.Client) -> dict[str | None, int]:
        view = UsageView.model_validate(client.get("/v1/usage").json())
        return {line.owner: line.kept_bytes for line in view.owners}

    anns = 5 + len(blob_of(SHARDS)[1])
    assert kept(owner_of(small_box)) == {"ann": anns, "bob": bobs, "eve": eves}
    assert kept(bob) == {"bob": bobs, None: anns + eves}


def test_a_receipt_is_read_out_of_its_result(small_box: Box) -> None:
    job_id = submit(small_box.client)
    assert small_box.client.get(f"/v1/jobs/{job_id}/receipt").status_code == 409
    receipt = {
        "protocol": 1, "job": job_id, "spec_digest": "d", "computation": "gradient",
        "model": "tiny", "model_version": "v", "seed": 0, "mode": "eval", "precision": "fp32",
        "device": "cpu", "torch": "2", "gradbox": "0", "shards": {"z": 2}, "seconds": {},
        "peak_memory_bytes": 1, "memory_before_bytes": 1,
    }  # fmt: skip
    data = save({"a": ones(2)}, metadata={"gradbox": json.dumps(receipt)})
    run_job(small_box.backing, job_id, data=data)
    found = small_box.client.get(f"/v1/jobs/{job_id}/receipt")
    assert found.json()["job"] == job_id
    assert small_box.client_of("bob").get(f"/v1/jobs/{job_id}/receipt").status_code == 404
    small_box.client.delete(f"/v1/jobs/{job_id}/result")
    assert small_box.client.get(f"/v1/jobs/{job_id}/receipt").status_code == 410
