"""HEAD wherever there is GET."""

from __future__ import annotations

import httpx
import pytest

from gradbox_service.backing import Backing
from gradbox_service.settings import Settings
from tests.service.boxes import announce, run_job, submit
from tests.service.conftest import Box
from tests.service.test_server import client_of, running

STREAMS = {"/v1/jobs/{job_id}/events", "/v1/box/events"}
FOR_OWNERS = {"/metrics"}
CHANGING = {"content-length", "date", "x-request-id"}  # with the time that a box has run


def test_head_is_get_without_its_body(small_box: Box) -> None:
    job_id = submit(small_box.client)
    run_job(small_box.backing, job_id, data=b"result")
    run = {"model": "tiny", "optimizer": {"name": "sgd"}}
    run_id = small_box.client.post("/v1/runs", json=run).json()["id"]
    store = small_box.client.post("/v1/stores", json={"name": "rows", "model": "tiny"}).json()
    names = {"job_id": job_id, "name": "tiny", "run_id": run_id, "store_id": store["id"]}
    paths = small_box.client.get("/openapi.json").json()["paths"]
    readable = {path for path, methods in paths.items() if "get" in methods}
    assert readable >= STREAMS | FOR_OWNERS
    for path in [*(readable - STREAMS), "/openapi.json", "/", "/nowhere"]:
        url = path.format(number=0, **names)
        got, head = (small_box.client.request(method, url) for method in ("GET", "HEAD"))
        assert head.status_code == got.status_code, path
        assert head.content == b"", path
        assert "content-length" in head.headers, path
        assert _lasting(head.headers) == _lasting(got.headers), path


def _lasting(headers: httpx.Headers) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in CHANGING}


def test_a_stream_of_events_has_no_head(small_box: Box) -> None:
    answer = small_box.client.head("/v1/box/events")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


def test_a_connection_goes_on_after_head(redis_settings: Settings) -> None:
    with running(redis_settings) as (_, url):
        announce(Backing.on_redis(redis_settings))
        client = client_of(redis_settings, url)
        for _ in range(2):
            assert client.head("/v1/models").headers["content-type"] == "application/json"
            assert client.get("/v1/models").json()["models"][0]["name"] == "tiny"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/jobs", "GET, HEAD, POST"),
        ("/v1/jobs/j1", "GET, HEAD, DELETE"),
        ("/v1/jobs/j1/result", "GET, HEAD, DELETE"),
        ("/v1/jobs/j1/events", "GET"),
        ("/v1/blobs/" + "0" * 64, "HEAD, PUT, DELETE"),
        ("/v1/models/reload", "GET, HEAD, POST"),
        ("/", "GET, HEAD"),
    ],
)
def test_a_refused_method_hears_which_there_are(small_box: Box, path: str, allowed: str) -> None:
    answer = small_box.client.request("PATCH", path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
