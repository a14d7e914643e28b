"""What one owner may take, and what Redis may: refused with the numbers, before it is taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import redis

from gradbox import Retry
from gradbox.http.connection import Connection
from gradbox.settings import ClientSettings
from gradbox_service.admission import posting
from gradbox_service.backing import Backing
from gradbox_service.jobs import Records
from gradbox_service.jobs.records import Memory
from gradbox_service.settings import Settings
from tests.service.boxes import SHARDS, blob_of, ones, run_job, spec_for, submit, upload
from tests.service.conftest import Box, serve

QUOTA_BYTES = 10_000


@pytest.fixture
def quota_box(backing: Backing, tmp_path: Path) -> Iterator[Box]:
    yield from serve(backing, Settings(data=tmp_path / "data", owner_quota_bytes=QUOTA_BYTES))


@pytest.mark.parametrize("announced", [True, False])
def test_an_upload_above_the_quota_is_refused_with_the_numbers(
    quota_box: Box, announced: bool
) -> None:
    upload(quota_box.client, {"x": ones(1500)})
    digest, data = blob_of({"x": ones(1501)})
    content = data if announced else iter([data])
    answer = quota_box.client.put(f"/v1/blobs/{digest}", content=content)
    assert (answer.status_code, answer.json()["category"]) == (507, "transient")
    assert answer.json()["type"] == "urn:gradbox:problem:storage-full"
    assert "9.8 KiB that one owner may have" in answer.json()["detail"]
    # More than a client's patience: what makes room is a quarter of an hour old, or deleted.
    assert int(answer.headers["Retry-After"]) > Retry().patience_s
    assert quota_box.backing.blobs.size_bytes(digest) is None
    assert quota_box.client_of("bob").put(f"/v1/blobs/{digest}", content=data).status_code == 201


@pytest.mark.parametrize("announced", [True, False])
def test_what_exceeds_the_quota_by_itself_is_not_worth_a_wait(
    quota_box: Box, announced: bool
) -> None:
    digest, data = blob_of({"x": ones(3000)})
    content = data if announced else iter([data])
    answer = quota_box.client.put(f"/v1/blobs/{digest}", content=content)
    assert (answer.status_code, answer.json()["category"]) == (413, "user")
    assert "at most the 9.8 KiB" in answer.json()["detail"]
    assert "Retry-After" not in answer.headers
    assert quota_box.backing.blobs.size_bytes(digest) is None


def test_results_count_and_a_deleted_one_makes_room(quota_box: Box) -> None:
    job_id = submit(quota_box.client)
    run_job(quota_box.backing, job_id, data=bytes(QUOTA_BYTES))
    blob = blob_of(SHARDS)[0]
    refused = quota_box.client.post("/v1/jobs", json=spec_for(blob))
    assert refused.status_code == 507
    assert "your results 9.8 KiB" in refused.json()["detail"]
    quota_box.client.delete(f"/v1/jobs/{job_id}/result")
    assert quota_box.client.post("/v1/jobs", json=spec_for(blob)).status_code == 202


@pytest.mark.parametrize("announced", [True, False])
def test_a_quota_holds_under_parallel_uploads(quota_box: Box, announced: bool) -> None:
    blobs = dict(blob_of({"x": ones(900 + n)}) for n in range(5))  # two of them fit
    decided: set[str] = set()
    all_decided = threading.Event()

    def decide(digest: str) -> None:
        decided.add(digest)
        if len(decided) == len(blobs):
            all_decided.set()

    def content(digest: str) -> Iterator[bytes]:
        yield blobs[digest][:1000]
        decide(digest)
        assert all_decided.wait(60.0)
        yield blobs[digest][1000:]

    def put(digest: str) -> int:
        headers = {"Content-Length": str(len(blobs[digest]))} if announced else {}
        url = f"/v1/blobs/{digest}"
        answer = quota_box.client.put(url, content=content(digest), headers=headers)
        decide(digest)
        return answer.status_code

    with ThreadPoolExecutor(len(blobs)) as pool:
        assert sorted(pool.map(put, blobs)) == [201] * 2 + [507] * 3
    assert quota_box.backing.owners.totals()["ann"] <= QUOTA_BYTES


@pytest.mark.parametrize("ended", [False, True])
def test_a_request_waits_for_a_job_as_after_a_429(quota_box: Box, ended: bool) -> None:
    job_id = submit(quota_box.client)
    upload(quota_box.client, {"x": ones(2000)})
    if ended:
        run_job(quota_box.backing, job_id, data=b"not read yet")
        quota_box.backing.blobs.size_bytes(blob_of(SHARDS)[0])  # another job is to name it
    digest, data = blob_of({"x": ones(1000)})
    refused = quota_box.client.put(f"/v1/blobs/{digest}", content=data)
    assert refused.status_code == 507
    after_s = int(refused.headers["Retry-After"])
    assert after_s == pytest.approx(900, abs=30) if ended else after_s == 2


def test_the_client_waits_for_room_as_it_is_told(quota_box: Box) -> None:
    job_id = submit(quota_box.client)
    upload(quota_box.client, {"x": ones(2000)})
    digest, data = blob_of({"x": ones(1000)})
    token = quota_box.backing.tokens.create("ann")
    settings = ClientSettings(url="http://box", token=token)
    connection = Connection(settings, transport=quota_box.transport)

    def end_it() -> None:
        run_job(quota_box.backing, job_id, data=b"result")
        quota_box.client.delete("/v1/blobs/" + blob_of({"x": ones(2000)})[0])

    ending = threading.Timer(0.5, end_it)
    ending.start()
    began = time.monotonic()
    answer = connection.request("PUT", f"/v1/blobs/{digest}", body=lambda: [data])
    assert answer.status_code == 201
    assert time.monotonic() - began >= 2.0
    ending.join()


def test_new_jobs_and_blobs_are_refused_before_the_memory_is_full(
    backing: Backing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data=tmp_path)
    full = Memory(used_bytes=900, bound_bytes=1000)
    monkeypatch.setattr(Records, "memory", lambda *_, **__: full)
    for box in serve(backing, settings):
        digest, data = blob_of(SHARDS)
        for answer in (
            box.client.post("/v1/jobs", json=spec_for(digest)),
            box.client.put(f"/v1/blobs/{digest}", content=data),
        ):
            assert (answer.status_code, answer.json()["category"]) == (503, "transient")
            assert "900 B of the 1000 B" in answer.json()["detail"]
            assert int(answer.headers["retry-after"]) > 0
        assert box.client.get("/v1/jobs").status_code == 200
        ready = box.client.get("/readyz")
        assert ready.status_code == 200
        assert "900 B of the 1000 B" in ready.json()["refuses"]
        backing.fleet.retire("worker-1")
        detail = box.client.get("/readyz").json()["detail"]
        assert detail.index("900 B of the 1000 B") < detail.index("the first start loads torch")


def test_jobs_fill_the_memory_up_to_a_clear_refusal_and_no_further(
    redis_settings: Settings, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "MEMORY_S", 0.0)
    bound = int(connection.info("memory")["used_memory"]) + 4 * 2**20
    connection.config_set("maxmemory", bound)
    try:
        for box in serve(Backing.on_redis(redis_settings), redis_settings):
            blob = upload(box.client, SHARDS)
            body = spec_for(blob, name="x" * 100)
            first = box.client.post("/v1/jobs", json=body).json()["id"]
            filler = np.zeros(2**19, np.uint8).tobytes()
            numbers = iter(range(100))
            while box.client.post("/v1/jobs", json=body).status_code == 202:
                connection.set(f"filler{next(numbers)}", filler)
            answer = box.client.post("/v1/jobs", json=body)
            assert answer.status_code == 503
            assert "takes" in answer.json()["detail"]
            run_job(box.backing, first, data=b"result")
            assert box.client.get(f"/v1/jobs/{first}").json()["state"] == "done"
            assert box.client.delete(f"/v1/jobs/{first}/result").status_code == 204
    finally:
        connection.config_set("maxmemory", 0)
