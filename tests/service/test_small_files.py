"""Small blobs and results: in Redis at first, and in the data folder once they were kept."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import redis

from gradbox_service.cleaning.cleaner import Cleaner
from gradbox_service.settings import Settings
from gradbox_service.store import SMALL_BYTES
from tests.service.boxes import SHARDS, blob_of, finish_small, ones
from tests.service.conftest import Box
from tests.service.test_one_trip import form, job_part, post

DIGEST, DATA = blob_of(SHARDS)


def files_in(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def job_id(box: Box) -> str:
    return str(post(box.client, form([job_part(), (DIGEST, DATA)])).json()["id"])


def test_a_small_blob_of_a_job_is_in_no_file(box: Box, job_id: str) -> None:
    assert box.backing.records.get(job_id) is not None
    assert files_in(box.backing.blobs.room.folder) == []
    assert box.client.head(f"/v1/blobs/{DIGEST}").status_code == 200
    (listed,) = box.client.get("/v1/blobs").json()["blobs"]
    assert (listed["digest"], listed["size_bytes"]) == (DIGEST, len(DATA))


def test_a_small_result_is_read_like_a_file(box: Box, job_id: str) -> None:
    finish_small(box.backing, job_id, data=DATA)
    assert files_in(box.backing.results.room.folder) == []
    whole = box.client.get(f"/v1/jobs/{job_id}/result")
    assert whole.content == DATA
    part = box.client.get(f"/v1/jobs/{job_id}/result", headers={"Range": "bytes=8-15"})
    assert (part.status_code, part.content) == (206, DATA[8:16])
    assert box.client.head(f"/v1/jobs/{job_id}/result").headers["etag"] == whole.headers["etag"]
    assert box.client.delete(f"/v1/jobs/{job_id}/result").status_code == 204
    assert box.client.get(f"/v1/jobs/{job_id}/result").status_code == 410
    assert dict(box.backing.records.result_bytes()) == {}


def test_a_blob_goes_with_its_owner(box: Box, job_id: str) -> None:
    assert box.client.delete(f"/v1/blobs/{DIGEST}").status_code == 409
    finish_small(box.backing, job_id, data=DATA)
    assert box.client.delete(f"/v1/blobs/{DIGEST}").status_code == 204
    assert box.client.head(f"/v1/blobs/{DIGEST}").status_code == 404
    assert box.backing.blobs.small(DIGEST) is None


def test_what_is_kept_moves_to_the_folder(
    box: Box, job_id: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_small(box.backing, job_id, data=DATA)
    box.client.get(f"/v1/jobs/{job_id}/result")
    cleaner = Cleaner(Settings(data=box.backing.blobs.room.folder.parent), box.backing)
    cleaner.clean()
    assert box.backing.blobs.small(DIGEST) == DATA
    monkeypatch.setattr("gradbox_service.store.small.KEPT_S", -1.0)
    cleaner.clean()
    assert connection.keys("gradbox:small:*") == connection.keys("gradbox:fetched:*") == []
    assert files_in(box.backing.blobs.room.folder) == [DIGEST]
    assert box.backing.blobs.path(DIGEST).read_bytes() == DATA
    found = box.backing.results.use_of(job_id, attempt=1)
    assert found is not None
    assert found.read_only
    assert found.used_s == pytest.approx(time.time(), abs=60.0)
    assert box.client.get(f"/v1/jobs/{job_id}/result").content == DATA
    assert box.client.head(f"/v1/blobs/{DIGEST}").status_code == 200


def test_a_damaged_blob_is_not_here(box: Box, job_id: str, connection: redis.Redis) -> None:
    connection.set(f"gradbox:small:blob:{DIGEST}", DATA[:-1] + b"\x09")
    assert box.client.head(f"/v1/blobs/{DIGEST}").status_code == 404
    assert post(box.client, form([job_part(), (DIGEST, DATA)])).status_code == 202
    assert box.client.head(f"/v1/blobs/{DIGEST}").status_code == 200


def test_a_blob_of_64_kib_is_a_file(box: Box) -> None:
    digest, data = blob_of({"x": ones(SMALL_BYTES // 4)})
    assert len(data) > SMALL_BYTES
    assert box.client.put(f"/v1/blobs/{digest}", content=data).status_code == 201
    assert files_in(box.backing.blobs.room.folder) == [digest]


def test_an_attempt_that_does_not_count_leaves_no_result(box: Box, job_id: str) -> None:
    finish_small(box.backing, job_id, data=DATA, attempt=2)
    assert box.backing.results.use_of(job_id, attempt=2) is None
