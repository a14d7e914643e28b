"""Blobs over HTTP."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradbox_service.settings import MIB, Settings
from tests.disks import small_disk
from tests.service.boxes import SHARDS, blob_of, ones, run_job, spec_for, submit, upload
from tests.service.conftest import Box, serve
from tests.valkey import empty_backing


def in_pieces(data: bytes, size: int = 1000) -> Iterator[bytes]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


def test_a_blob_is_there_once_it_is_stored(small_box: Box) -> None:
    digest, data = blob_of({"x": ones(100)})
    client = small_box.client
    assert client.head(f"/v1/blobs/{digest}").status_code == 404
    stored = client.put(f"/v1/blobs/{digest}", content=data)
    assert (stored.status_code, stored.json()) == (
        201,
        {"digest": digest, "size_bytes": len(data)},
    )
    assert client.head(f"/v1/blobs/{digest}").status_code == 200
    assert client.put(f"/v1/blobs/{digest}", content=data).status_code == 200


def test_the_length_need_not_be_announced(small_box: Box) -> None:
    digest, data = blob_of({"x": ones(5000)})
    answer = small_box.client.put(f"/v1/blobs/{digest}", content=in_pieces(data))
    assert answer.status_code == 201
    assert small_box.backing.blobs.path(digest).read_bytes() == data


def test_bytes_of_another_digest_are_refused(small_box: Box) -> None:
    digest, data = blob_of({"x": ones(100)})
    answer = small_box.client.put(f"/v1/blobs/{digest}", content=data[:-1] + b"\7")
    assert answer.status_code == 422
    assert answer.json()["type"].endswith("blob-rejected")
    assert digest in answer.json()["detail"]
    assert small_box.client.head(f"/v1/blobs/{digest}").status_code == 404


@pytest.mark.parametrize("cut", [0, 7, 20, -1])
def test_a_truncated_safetensors_file_is_refused(small_box: Box, cut: int) -> None:
    data = blob_of({"x": ones(100)})[1][:cut]
    digest = hashlib.sha256(data).hexdigest()
    answer = small_box.client.put(f"/v1/blobs/{digest}", content=data)
    assert answer.status_code == 422
    assert answer.json()["type"].endswith("blob-rejected")
    assert "not a valid safetensors file" in answer.json()["detail"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_blob_over_the_limit_is_refused(small_box: Box, announced: bool) -> None:
    digest, data = blob_of({"x": ones(50_000)})
    content: Any = data if announced else in_pieces(data)
    answer = small_box.client.put(f"/v1/blobs/{digest}", content=content)
    assert answer.status_code == 413
    assert answer.json()["type"].endswith("blob-too-large")
    assert "100000" in answer.json()["detail"]


@pytest.mark.parametrize("digest", ["zz", "A" * 64, "0" * 63, "..%2f..%2fetc"])
def test_only_a_digest_names_a_blob(small_box: Box, digest: str) -> None:
    answer = small_box.client.put(f"/v1/blobs/{digest}", content=b"x")
    assert answer.status_code in (404, 422)
    assert answer.headers["content-type"] == "application/problem+json"


def test_the_same_blob_from_many_at_once(small_box: Box) -> None:
    digest, data = blob_of({"x": np.arange(10_000, dtype=np.float32)})

    def put(_: int) -> int:
        return small_box.client.put(f"/v1/blobs/{digest}", content=in_pieces(data)).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(put, range(8))) <= {200, 201}
    assert small_box.backing.blobs.path(digest).read_bytes() == data


def test_an_owner_lists_their_blobs_in_pages(box: Box) -> None:
    mine = {upload(box.client, {"x": ones(n)}) for n in range(1, 6)}
    upload(box.client_of("bob"), {"x": ones(9)})
    found: list[dict[str, Any]] = []
    query: dict[str, Any] = {"limit": 2}
    while query.get("cursor", "") is not None:
        page = box.client.get("/v1/blobs", params=query).json()
        found += page["blobs"]
        query["cursor"] = page["next"]
    assert [blob["digest"] for blob in found] == sorted(mine)
    sizes = {digest: box.backing.blobs.path(digest).stat().st_size for digest in mine}
    assert {blob["digest"]: blob["size_bytes"] for blob in found} == sizes
    assert box.client.get("/v1/blobs", params={"limit": 0}).status_code == 422


def test_an_owner_deletes_their_blobs_and_nobody_elses(box: Box) -> None:
    bob = box.client_of("bob")
    shared, mine = ({"x": ones(n)} for n in (2, 3))
    both = {upload(client, shared) for client in (box.client, bob)}.pop()
    alone = upload(box.client, mine)
    assert bob.delete(f"/v1/blobs/{alone}").status_code == 204
    assert box.client.head(f"/v1/blobs/{alone}").status_code == 200
    for digest in (both, alone, alone):
        assert box.client.delete(f"/v1/blobs/{digest}").status_code == 204
        assert box.client.head(f"/v1/blobs/{digest}").status_code == 404
    assert box.client.get("/v1/blobs").json()["blobs"] == []
    assert bob.head(f"/v1/blobs/{both}").status_code == 200
    assert not box.backing.blobs.path(alone).exists()
    assert dict(box.backing.owners.totals()) == {"bob": len(blob_of(shared)[1])}
    assert upload(box.client, mine) == alone


def test_a_blob_that_a_job_needs_cannot_be_deleted(box: Box) -> None:
    job_id = submit(box.client)
    digest = blob_of(SHARDS)[0]
    refused = box.client.delete(f"/v1/blobs/{digest}")
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:gradbox:problem:blob-in-use")
    assert job_id in refused.json()["detail"]
    assert box.client.head(f"/v1/blobs/{digest}").status_code == 200
    box.client.delete(f"/v1/jobs/{job_id}")
    assert box.client.delete(f"/v1/blobs/{digest}").status_code == 204


@pytest.mark.parametrize("kind", ["read-only", "inodes"])
def test_a_disk_that_takes_no_file_is_named_and_refuses_new_jobs(tmp_path: Path, kind: str) -> None:
    with small_disk(tmp_path / "disk", size_bytes=8 * MIB, num_inodes=100) as disk:
        settings = Settings(data=disk, disk_reserve_bytes=MIB)
        backing = empty_backing(disk, settings)
        for box in serve(backing, settings):
            job_id = submit(box.client)
            run_job(backing, job_id, data=b"result")
            digest, data = blob_of({"x": ones(100)})
            with refusing(disk, kind):
                answers = [
                    box.client.put(f"/v1/blobs/{digest}", content=data),
                    box.client.post("/v1/jobs", json=spec_for(blob_of(SHARDS)[0])),
                    box.client.post("/v1/jobs", content=b" " * MIB),
                ]
                ready = box.client.get("/readyz").json()["refuses"]
                fetched = box.client.get(f"/v1/jobs/{job_id}/result")
                assert box.client.head(f"/v1/blobs/{blob_of(SHARDS)[0]}").status_code == 200
                if kind == "read-only":
                    answers.append(box.client.delete(f"/v1/jobs/{job_id}/result"))
            named = "is read-only" if kind == "read-only" else "no inode left"
            for answer in answers:
                assert (answer.status_code, answer.json()["category"]) == (507, "transient")
                assert named in answer.json()["detail"]
            assert named in ready
            assert fetched.content == b"result"
            assert box.client.put(f"/v1/blobs/{digest}", content=data).status_code == 201


@contextmanager
def refusing(disk: Path, kind: str) -> Iterator[None]:
    """Turn a disk read-only, or use up its inodes."""
    if kind == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        yield
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        return
    with suppress(OSError):
        for number in count():
            (disk / f"filler{number}").touch()
    yield
    for path in disk.glob("filler*"):
        path.unlink()


@pytest.mark.parametrize("announced", [True, False])
def test_a_disk_that_fills_up_is_said_and_left_as_it_was(tmp_path: Path, announced: bool) -> None:
    with small_disk(tmp_path / "disk", size_bytes=8 * MIB) as disk:
        settings = Settings(data=disk, disk_reserve_bytes=2 * MIB)
        backing = empty_backing(disk, settings)
        digest, data = blob_of({"x": ones(7 * MIB // 4)})
        for box in serve(backing, settings):
            content: Any = data if announced else in_pieces(data)
            answer = box.client.put(f"/v1/blobs/{digest}", content=content)
            assert (answer.status_code, answer.json()["category"]) == (507, "transient")
            assert "2.0 MiB are kept in reserve" in answer.json()["detail"]
            assert "Retry-After" in answer.headers
        assert not [path for path in disk.rglob("*") if path.is_file()]


def test_more_bytes_than_the_disk_has_are_refused_before_they_come(tmp_path: Path) -> None:
    digest, _ = blob_of({"x": ones(100)})
    for box in serve(empty_backing(tmp_path), Settings(data=tmp_path, max_blob_bytes=2**62)):
        answer = box.client.put(
            f"/v1/blobs/{digest}", content=b"", headers={"Content-Length": str(2**61)}
        )
        assert answer.status_code == 507
