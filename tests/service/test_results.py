"""Result files over HTTP."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from gradbox_service.http.routes.results import ResultResponse
from gradbox_service.jobs import JobRecord
from gradbox_service.store.files import use_of
from tests.service.boxes import begin, finish, run_job, submit
from tests.service.conftest import Box, client_with

DATA = os.urandom(3 * 2**20 + 17)
ETAG = f'"{hashlib.sha256(DATA).hexdigest()}"'


@pytest.fixture
def url(small_box: Box) -> str:
    """The URL of a result."""
    job_id = submit(small_box.client)
    run_job(small_box.backing, job_id, data=DATA)
    return f"/v1/jobs/{job_id}/result"


def test_a_result_comes_whole_with_its_digest(small_box: Box, url: str) -> None:
    answer = small_box.client.get(url)
    assert answer.content == DATA
    assert answer.headers["etag"] == ETAG
    assert answer.headers["content-length"] == str(len(DATA))
    assert answer.headers["accept-ranges"] == "bytes"
    assert "no-transform" in answer.headers["cache-control"]


def test_a_result_is_fetched_once_its_owner_was_sent_all_of_it(small_box: Box, url: str) -> None:
    results = small_box.backing.results
    (path,) = results.room.folder.glob("*.safetensors")
    admin = client_with(small_box.transport, small_box.backing.tokens.create("root", admin=True))
    small_box.client.head(url)
    small_box.client.get(url, headers={"Range": "bytes=0-"})
    assert admin.get(url).content == DATA
    found = use_of(path)
    assert found is not None
    assert not found.read_only
    assert small_box.client.get(url).content == DATA
    assert eventually(lambda: bool((use := use_of(path)) and use.read_only))


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60.0
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def test_head_tells_the_size(small_box: Box, url: str) -> None:
    answer = small_box.client.head(url)
    assert (answer.headers["content-length"], answer.headers["etag"]) == (str(len(DATA)), ETAG)
    assert answer.content == b""


@pytest.mark.parametrize(
    ("wanted", "begin", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=100-2000000", 100, 2_000_001),
        ("bytes=3145728-", 3_145_728, len(DATA)),
        ("bytes=-5", len(DATA) - 5, len(DATA)),
        ("bytes=0-99999999", 0, len(DATA)),
        ("bytes=9-" + "9" * 40, 9, len(DATA)),
        ("bytes=-" + "9" * 40, 0, len(DATA)),
    ],
)
def test_a_range_comes_alone(small_box: Box, url: str, wanted: str, begin: int, end: int) -> None:
    answer = small_box.client.get(url, headers={"Range": wanted})
    assert answer.status_code == 206
    assert answer.content == DATA[begin:end]
    assert answer.headers["content-range"] == f"bytes {begin}-{end - 1}/{len(DATA)}"
    assert answer.headers["etag"] == ETAG


@pytest.mark.parametrize(
    ("wanted", "status"),
    [
        ("bytes=99999999-", 416),
        ("bytes=5-4", 416),
        ("bytes=-0", 416),
        ("bytes=a-b", 400),
        ("bytes=", 400),
        ("bytes", 400),
        ("bytes=" + "9" * 40 + "-", 416),
        ("bytes=" + "9" * 5000 + "-", 400),
    ],
)
@pytest.mark.parametrize("condition", [{}, {"If-Range": ETAG}], ids=["always", "of this file"])
def test_a_range_that_cannot_be_served_is_a_problem(
    small_box: Box, url: str, condition: dict[str, str], wanted: str, status: int
) -> None:
    answer = small_box.client.get(url, headers={"Range": wanted, **condition})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    if status == 416:
        assert answer.headers["content-range"] == f"bytes */{len(DATA)}"


@pytest.mark.parametrize("wanted", ["lines=1-2", "lines", "", "bytes=0-9,20-29"])
def test_a_range_in_another_unit_and_several_are_ignored(
    small_box: Box, url: str, wanted: str
) -> None:
    answer = small_box.client.get(url, headers={"Range": wanted})
    assert (answer.status_code, answer.content) == (200, DATA)


@pytest.mark.parametrize("wanted", ["bytes=0-9", "bytes=99999999-", "bytes=a-b"])
def test_head_knows_no_ranges(small_box: Box, url: str, wanted: str) -> None:
    answer = small_box.client.head(url, headers={"Range": wanted})
    assert (answer.status_code, answer.headers["content-length"]) == (200, str(len(DATA)))


@pytest.mark.parametrize(
    ("etag", "status"), [(ETAG, 206), ('"other"', 200)], ids=["this file", "another"]
)
def test_a_range_of_another_file_is_not_mixed_in(
    small_box: Box, url: str, etag: str, status: int
) -> None:
    headers = {"Range": "bytes=0-9", "If-Range": etag}
    assert small_box.client.get(url, headers=headers).status_code == status


def test_reading_a_result_leaves_its_date(small_box: Box, url: str) -> None:
    small_box.backing.records.update(url.split("/")[3], lambda job: replace(job, finished_s=0.0))
    finished = "Thu, 01 Jan 1970 00:00:00 GMT"
    resumed = small_box.client.get(url, headers={"Range": "bytes=9-", "If-Range": finished})
    assert (resumed.status_code, resumed.headers["last-modified"]) == (206, finished)


@pytest.mark.parametrize(
    ("given", "status"),
    [({}, 200), ({"Range": "bytes=0-9"}, 206), ({"If-None-Match": ETAG}, 304)],
)
def test_the_schema_says_what_an_answer_has(
    small_box: Box, url: str, given: dict[str, str], status: int
) -> None:
    paths = small_box.client.get("/openapi.json").json()["paths"]
    call = paths["/v1/jobs/{job_id}/result"]["get"]
    answer = small_box.client.get(url, headers=given)
    described = call["responses"][str(status)]
    assert answer.status_code == status
    assert "ETag" in described["headers"]
    assert all(name in answer.headers for name in described["headers"])
    assert answer.headers.get("content-type") in [*described.get("content", [None])]
    assert {name.lower() for name in given} <= {each["name"] for each in call["parameters"]}


@pytest.mark.parametrize("known", [ETAG, f'"a", W/{ETAG}', "*"], ids=["it", "among others", "any"])
def test_a_known_result_is_not_sent_again(small_box: Box, url: str, known: str) -> None:
    answer = small_box.client.get(url, headers={"If-None-Match": known})
    assert (answer.status_code, answer.content) == (304, b"")
    assert answer.headers["etag"] == ETAG


def test_a_job_that_is_not_done_has_no_result(small_box: Box) -> None:
    job_id = submit(small_box.client)
    answer = small_box.client.get(f"/v1/jobs/{job_id}/result")
    assert answer.status_code == 409
    assert "is queued" in answer.json()["detail"]
    small_box.client.delete(f"/v1/jobs/{job_id}")
    answer = small_box.client.get(f"/v1/jobs/{job_id}/result")
    assert "was cancelled" in answer.json()["detail"]


def test_a_result_that_was_removed_is_said(small_box: Box, url: str) -> None:
    job_id = url.split("/")[3]
    small_box.backing.results.discard(job_id, attempt=1)
    answer = small_box.client.get(url)
    assert answer.status_code == 410
    assert answer.json()["type"].endswith(":result-gone")
    assert "submit the job again" in answer.json()["detail"]


def test_a_result_removed_between_head_and_body_is_sent_whole(
    small_box: Box, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = ResultResponse.__call__

    async def removed_first(self: ResultResponse, *given: Any) -> None:
        small_box.backing.results.discard(url.split("/")[3], attempt=1)
        await send(self, *given)

    monkeypatch.setattr(ResultResponse, "__call__", removed_first)
    assert small_box.client.get(url).content == DATA
    assert small_box.client.get(url).status_code == 410


def test_a_result_can_be_deleted_by_its_owner(small_box: Box, url: str) -> None:
    job_id = url.split("/")[3]
    assert small_box.client_of("eve").delete(url).status_code == 404
    assert small_box.client.get(url).status_code == 200
    for _ in range(2):
        assert small_box.client.delete(url).status_code == 204
    answer = small_box.client.get(url)
    assert (answer.status_code, answer.json()["type"]) == (410, "urn:gradbox:problem:result-gone")
    assert small_box.client.get(url, headers={"If-None-Match": ETAG}).status_code == 410
    assert not small_box.backing.results.path(job_id, attempt=1).exists()
    assert small_box.client.get(f"/v1/jobs/{job_id}").json()["state"] == "done"
    assert dict(small_box.backing.records.result_bytes()) == {}


def test_the_result_of_a_job_that_has_not_ended_cannot_be_deleted(small_box: Box) -> None:
    job_id = submit(small_box.client)
    answer = small_box.client.delete(f"/v1/jobs/{job_id}/result")
    assert (answer.status_code, answer.json()["type"]) == (
        409,
        "urn:gradbox:problem:result-not-ready",
    )
    small_box.client.delete(f"/v1/jobs/{job_id}")
    assert small_box.client.delete(f"/v1/jobs/{job_id}/result").status_code == 204


def test_a_result_that_is_read_is_used(small_box: Box, url: str) -> None:
    path = small_box.backing.results.path(url.split("/")[3], attempt=1)
    os.utime(path, (0, 0))
    small_box.client.get(url, headers={"Range": "bytes=0-0"})
    assert path.stat().st_atime > 0


def test_a_late_attempt_does_not_change_the_result(small_box: Box) -> None:
    job_id = submit(small_box.client)
    records = small_box.backing.records
    begin(records, job_id)
    records.update(job_id, partial(JobRecord.requeue, attempt=1, reason="x", now_s=1.0))
    begin(records, job_id)
    finish(small_box.backing, job_id, attempt=2, data=b"second")
    small_box.backing.results.path(job_id, attempt=1).write_bytes(b"late")
    assert small_box.client.get(f"/v1/jobs/{job_id}/result").content == b"second"
