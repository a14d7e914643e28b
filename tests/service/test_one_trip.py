"""A job, its blobs and its result in one request and its answer."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest

from gradbox.protocol import JOB_AND_RESULT, split_result
from tests.service.boxes import SHARDS, blob_of, ones, run_job, spec_for, upload
from tests.service.conftest import Box

DIGEST, DATA = blob_of(SHARDS)
BOUNDARY = "cut-here"


def form(parts: list[tuple[str, bytes]], *, boundary: str = BOUNDARY) -> bytes:
    pieces = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + content
        for name, content in parts
    ]
    return b"\r\n".join([*pieces, f"--{boundary}--\r\n".encode()])


def job_part(**fields: Any) -> tuple[str, bytes]:
    return ("job", json.dumps(spec_for(DIGEST, **fields)).encode())


def post(client: httpx.Client, body: bytes, **headers: str) -> httpx.Response:
    content_type = f"multipart/form-data; boundary={BOUNDARY}"
    given = {"Content-Type": content_type} | {k.replace("_", "-"): v for k, v in headers.items()}
    return client.post("/v1/jobs", content=body, headers=given)


def finished_soon(box: Box, data: bytes) -> threading.Thread:
    """Play the worker that runs the next job."""

    def work() -> None:
        give_up = time.monotonic() + 10.0
        while not (active := box.backing.records.active()) and time.monotonic() < give_up:
            time.sleep(0.005)
        run_job(box.backing, active[0].id, data=data)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_job_and_its_blobs_are_one_request(box: Box) -> None:
    answer = post(box.client, form([job_part(name="one"), (DIGEST, DATA)]))
    assert answer.status_code == 202, answer.text
    assert answer.json()["name"] == "one"
    assert "Preference-Applied" not in answer.headers
    assert box.client.head(f"/v1/blobs/{DIGEST}").status_code == 200
    assert box.backing.owners.totals()["ann"] == len(DATA)


def test_a_blob_that_came_with_a_job_is_nobody_elses(box: Box) -> None:
    post(box.client, form([job_part(), (DIGEST, DATA)]))
    bob = box.client_of("bob")
    assert bob.head(f"/v1/blobs/{DIGEST}").status_code == 404
    assert post(bob, form([job_part()])).json()["type"].endswith("missing-blobs")
    assert post(bob, form([job_part(), (DIGEST, DATA)])).status_code == 202
    assert box.backing.owners.totals()["bob"] == len(DATA)


def test_a_digest_that_lies_stores_nothing(box: Box) -> None:
    answer = post(box.client, form([job_part(), (DIGEST, DATA[:-1] + b"\x07")]))
    assert answer.status_code == 422
    assert answer.json()["type"].endswith("blob-rejected")
    assert box.client.head(f"/v1/blobs/{DIGEST}").status_code == 404
    assert box.client.get("/v1/jobs").json()["jobs"] == []


def test_a_digest_of_ones_own_that_lies_is_refused_as_well(box: Box) -> None:
    upload(box.client, SHARDS)
    answer = post(box.client, form([job_part(), (DIGEST, DATA[:-1] + b"\x07")]))
    assert answer.json()["type"].endswith("blob-rejected")


def test_a_blob_that_comes_with_a_job_is_no_larger_than_another_may_be(small_box: Box) -> None:
    digest, data = blob_of({"x": ones(25_000)})
    answer = post(
        small_box.client, form([("job", json.dumps(spec_for(digest)).encode()), (digest, data)])
    )
    assert (answer.status_code, answer.json()["type"]) == (
        413,
        "urn:gradbox:problem:blob-too-large",
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--cut-here--\r\n",
        form([(DIGEST, DATA)]),
        form([job_part(), job_part()]),
        form([job_part(), ("x", b"")]),
        form([job_part(), (DIGEST, DATA)])[:-20],
        form([job_part()], boundary="elsewhere"),
        form([job_part(), *((f"{n:064x}", b"") for n in range(300))]),
    ],
    ids=["empty", "no part", "no job", "two jobs", "a name", "cut", "boundary", "many parts"],
)
def test_a_form_that_is_none_is_refused(small_box: Box, body: bytes) -> None:
    answer = post(small_box.client, body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["type"].endswith("invalid-job")


def test_a_form_without_a_boundary_is_refused(small_box: Box) -> None:
    headers = {"Content-Type": "multipart/form-data"}
    answer = small_box.client.post("/v1/jobs", content=form([job_part()]), headers=headers)
    assert answer.json()["type"].endswith("invalid-job")


def test_a_form_holds_at_most_a_mebibyte(small_box: Box) -> None:
    answer = post(small_box.client, form([job_part(), (DIGEST, bytes(2**20))]))
    assert answer.status_code == 413


def test_an_answer_waits_for_the_end_and_holds_the_result(box: Box) -> None:
    worker = finished_soon(box, DATA)
    accept = f"{JOB_AND_RESULT}, application/json"
    answer = post(box.client, form([job_part(), (DIGEST, DATA)]), Prefer="wait=9", Accept=accept)
    worker.join()
    assert answer.status_code == 200
    assert answer.headers["Preference-Applied"] == "wait=9"
    assert answer.headers["Content-Type"] == JOB_AND_RESULT
    view, result = split_result(answer.content)
    assert (view.state, bytes(result)) == ("done", DATA)


def test_the_same_key_finds_the_job_and_its_result_again(box: Box) -> None:
    body = form([job_part(), (DIGEST, DATA)])
    first = post(box.client, body, Idempotency_Key="once")
    run_job(box.backing, first.json()["id"], data=DATA)
    again = post(box.client, body, Idempotency_Key="once", Prefer="wait=1", Accept=JOB_AND_RESULT)
    view, result = split_result(again.content)
    assert (view.id, bytes(result)) == (first.json()["id"], DATA)


def test_who_does_not_take_the_result_gets_the_job_alone(box: Box) -> None:
    worker = finished_soon(box, DATA)
    answer = post(box.client, form([job_part(), (DIGEST, DATA)]), Prefer="wait=9")
    worker.join()
    assert (answer.status_code, answer.json()["state"]) == (200, "done")


def test_a_large_result_does_not_come_with_the_job(box: Box) -> None:
    upload(box.client, SHARDS)
    job_id = post(box.client, form([job_part()])).json()["id"]
    run_job(box.backing, job_id, data=bytes(2**20 + 1))
    headers = {"Prefer": "wait=1", "Accept": JOB_AND_RESULT}
    answer = box.client.get(f"/v1/jobs/{job_id}", headers=headers)
    assert answer.json()["state"] == "done"


def test_a_wait_that_is_over_gives_the_job_as_it_is(box: Box) -> None:
    upload(box.client, SHARDS)
    began = time.monotonic()
    answer = post(box.client, form([job_part()]), Prefer="respond-async, wait=1")
    assert (answer.status_code, answer.json()["state"]) == (202, "queued")
    assert time.monotonic() - began >= 1.0


def test_the_job_in_a_form_has_the_limit_of_one_alone(small_box: Box) -> None:
    name, job = job_part()
    answer = post(small_box.client, form([(name, job + b" " * 50_000), (DIGEST, DATA)]))
    assert (answer.status_code, answer.json()["type"]) == (
        413,
        "urn:gradbox:problem:blob-too-large",
    )
    assert post(small_box.client, form([(name, job), (DIGEST, DATA)])).status_code == 202


def test_a_wait_tells_nothing_once_its_token_is_revoked(box: Box) -> None:
    job_id = post(box.client, form([job_part(), (DIGEST, DATA)])).json()["id"]

    def revoke_and_run() -> None:
        time.sleep(1.5)
        box.backing.tokens.revoke("ann")
        run_job(box.backing, job_id, data=DATA)

    thread = threading.Thread(target=revoke_and_run)
    thread.start()
    answer = box.client.get(f"/v1/jobs/{job_id}", headers={"Prefer": "wait=30"})
    thread.join()
    assert answer.status_code == 401
    assert "ended during the wait" in answer.json()["detail"]


def test_a_blob_that_is_there_is_not_taken_again(box: Box) -> None:
    headers = {"If-None-Match": "*"}
    statuses = [
        box.client.put(f"/v1/blobs/{DIGEST}", content=DATA, headers=headers).status_code
        for _ in range(2)
    ]
    assert statuses == [201, 412]
