"""What one user learns of another's work, and what only the box's owner may."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from proofs.attacks.services import Service
from tests.service.boxes import SHARDS, blob_of, run_job, spec_for, submit, upload


@pytest.fixture
def ann(service: Service) -> Iterator[httpx.Client]:
    with service.client_of("ann") as client:
        yield client


@pytest.fixture
def eve(service: Service) -> Iterator[httpx.Client]:
    with service.client_of("eve") as client:
        yield client


@pytest.fixture
def root(service: Service) -> Iterator[httpx.Client]:
    with service.client_of("root", admin=True) as client:
        yield client


def secret() -> tuple[str, bytes]:
    """A blob that nobody has sent before."""
    values = np.random.default_rng().standard_normal(8).astype(np.float32)
    return blob_of(SHARDS | {"0/x": values[:4].reshape(2, 2), "1/x": values[4:6].reshape(1, 2)})


def told(answer: httpx.Response, digest: str) -> tuple[int, str]:
    """What an answer says, without what differs between any two."""
    detail = answer.json()["detail"].replace(digest, "DIGEST") if answer.content else ""
    return answer.status_code, detail.replace(digest[:12], "DIGEST")


def test_a_blob_that_another_has_sent_reads_as_one_that_is_not_there(
    ann: httpx.Client, eve: httpx.Client
) -> None:
    digest, data = secret()
    absent, _ = secret()
    assert ann.put(f"/v1/blobs/{digest}", content=data).status_code == 201
    for other in (digest, absent):
        answers = {
            "head": told(eve.head(f"/v1/blobs/{other}"), other),
            "use": told(eve.post("/v1/jobs", json=spec_for(other)), other),
            "put of nothing": told(eve.put(f"/v1/blobs/{other}", content=b""), other),
            "put of other bytes": told(eve.put(f"/v1/blobs/{other}", content=data[:-1]), other),
        }
        if other is digest:
            of_what_is_there = answers
    assert answers == of_what_is_there
    assert answers["head"][0] == 404
    assert answers["use"][0] == 422


def test_knowing_a_digest_gives_no_part_in_the_blob(ann: httpx.Client, eve: httpx.Client) -> None:
    digest, data = secret()
    ann.put(f"/v1/blobs/{digest}", content=data)
    assert eve.put(f"/v1/blobs/{digest}", content=b"x" * len(data)).status_code == 422
    assert eve.head(f"/v1/blobs/{digest}").status_code == 404
    assert ann.head(f"/v1/blobs/{digest}").status_code == 200


def test_who_sends_the_same_bytes_owns_them_too_and_they_are_stored_once(
    service: Service, ann: httpx.Client, eve: httpx.Client
) -> None:
    digest, data = secret()
    assert [one.put(f"/v1/blobs/{digest}", content=data).status_code for one in (ann, eve)] == [
        201,
        201,
    ]
    assert ann.put(f"/v1/blobs/{digest}", content=data).status_code == 200
    assert eve.post("/v1/jobs", json=spec_for(digest)).status_code == 202
    stored = list(service.backing.blobs.path(digest).parent.glob(f"{digest}*"))
    assert [path.read_bytes() for path in stored] == [data]
    assert list(service.backing.owners.owners_of(digest)) == ["ann", "eve"]


def test_the_owner_of_the_box_owns_nobodys_blobs(ann: httpx.Client, root: httpx.Client) -> None:
    digest, data = secret()
    ann.put(f"/v1/blobs/{digest}", content=data)
    assert root.head(f"/v1/blobs/{digest}").status_code == 404


def test_cotangents_of_anothers_job_are_refused_as_those_of_no_job(
    service: Service, ann: httpx.Client, eve: httpx.Client
) -> None:
    blob = upload(ann, SHARDS)
    forward = {"computation": "forward", "loss": None, "loss_inputs": None}
    spec = {name: value for name, value in (spec_for(blob) | forward).items() if value}
    job_id = ann.post("/v1/jobs", json=spec).json()["id"]
    details = []
    for forward_id in (job_id, "0" * 32):
        loss = {
            "kind": "cotangents",
            "forward": forward_id,
            "tensors": {"z": {"blob": blob, "tensor": "labels"}},
        }
        answer = eve.post("/v1/jobs", json={"computation": "gradient", "loss": loss})
        assert answer.status_code == 422
        details.append(answer.json()["detail"].replace(forward_id, "JOB"))
    assert details[0] == details[1]


def test_only_the_owner_of_the_box_sees_and_cancels_everybodys_jobs(
    service: Service, ann: httpx.Client, eve: httpx.Client, root: httpx.Client
) -> None:
    job_id, second = submit(ann), submit(eve)
    run_job(service.backing, second, data=b"rows")
    refused = eve.get("/v1/jobs", params={"all": "true"})
    assert (refused.status_code, refused.json()["type"]) == (403, "urn:gradbox:problem:owner-only")
    for asked in ("DELETE ", "GET ", "GET /events", "GET /result", "GET /spec"):
        method, path = asked.split(" ")
        answer = eve.request(method, f"/v1/jobs/{job_id}{path}")
        assert answer.status_code == 404
        assert answer.json()["type"] == "urn:gradbox:problem:job-not-found"

    listed = root.get("/v1/jobs", params={"all": "true"}).json()["jobs"]
    assert [job["id"] for job in listed[:2]] == [second, job_id]
    assert [job["owner"] for job in listed[:2]] == ["eve", "ann"]
    assert root.get("/v1/jobs").json()["jobs"] == []
    assert root.get(f"/v1/jobs/{job_id}").json()["owner"] == "ann"
    assert root.get(f"/v1/jobs/{second}/result").content == b"rows"
    assert root.delete(f"/v1/jobs/{job_id}").json()["state"] == "cancelled"
    assert ann.get(f"/v1/jobs/{job_id}").json()["state"] == "cancelled"


def test_everybodys_jobs_are_the_newest_in_order(service: Service, root: httpx.Client) -> None:
    clients = [service.client_of(name) for name in ("one", "two", "three")]
    ids = [submit(client) for client in clients * 2]
    everybody = {"all": "true", "limit": "4"}
    listed = root.get("/v1/jobs", params=everybody).json()["jobs"]
    assert [job["id"] for job in listed] == ids[:1:-1]
    done = root.get("/v1/jobs", params=everybody | {"state": "running"}).json()["jobs"]
    assert done == []


@pytest.mark.parametrize("priority", [1, 10])
def test_only_the_owner_of_the_box_goes_before_others(
    ann: httpx.Client, root: httpx.Client, priority: int
) -> None:
    spec = spec_for(upload(ann, SHARDS), priority=priority)
    refused = ann.post("/v1/jobs", json=spec)
    assert refused.status_code == 403
    assert "priority: expected -10 to 0" in refused.json()["detail"]
    assert ann.post("/v1/jobs", json=spec | {"priority": -10}).status_code == 202
    upload(root, SHARDS)
    assert root.post("/v1/jobs", json=spec).status_code == 202


@pytest.mark.parametrize("timeout_s", [24 * 3600 + 1, True, "60"])
def test_a_job_cannot_ask_for_any_time(ann: httpx.Client, timeout_s: object) -> None:
    answer = ann.post("/v1/jobs", json=spec_for(upload(ann, SHARDS), timeout_s=timeout_s))
    assert answer.status_code == 422
    assert "timeout_s: " in answer.json()["detail"]
