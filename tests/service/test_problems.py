"""Every error is problem+json and tells no more than it should."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gradbox.protocol import Problem
from gradbox_service.backing import Backing
from gradbox_service.http.app import create_app
from gradbox_service.settings import MIB, BadSettings, Settings
from gradbox_service.up.embedded_redis import EmbeddedRedis
from tests.disks import small_disk
from tests.inprocess import InProcessTransport
from tests.service.boxes import SHARDS, announce, spec_for, upload
from tests.service.conftest import Box, client_with
from tests.valkey import empty_backing


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing/here", 404, "not-found"),
        ("GET", "/v1/jobs/", 404, "not-found"),
        ("PATCH", "/v1/jobs", 405, "method-not-allowed"),
        ("GET", "/v1/jobs?limit=x", 422, "invalid-request"),
        ("GET", "/v1/jobs/nope", 404, "job-not-found"),
    ],
)
def test_every_refusal_is_a_problem(
    small_box: Box, method: str, path: str, status: int, code: str
) -> None:
    answer = small_box.client.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = Problem.model_validate(answer.json())
    assert (problem.code, problem.status, problem.category) == (code, status, "user")
    assert problem.request_id == answer.headers["x-request-id"]


def test_the_callers_request_id_is_kept_if_it_is_tidy(small_box: Box) -> None:
    for given, kept in (("abc-1.2", True), ("x" * 65, False), ("a b", False)):
        answer = small_box.client.get("/livez", headers={"X-Request-ID": given})
        assert (answer.headers["x-request-id"] == given) is kept


def test_a_failure_of_ours_tells_an_id_and_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(Settings(data=tmp_path), backing=empty_backing(tmp_path))

    @app.get("/broken")
    def broken() -> None:
        raise ZeroDivisionError("a secret")

    with InProcessTransport(app) as transport, caplog.at_level(logging.ERROR):
        answer = client_with(transport, "").get("/broken")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["category"] == "server"
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert answer.json()["request_id"] in caplog.text


def test_a_thread_that_ended_is_said(small_box: Box, tmp_path: Path) -> None:
    app = create_app(Settings(data=tmp_path), backing=small_box.backing)
    with InProcessTransport(app) as transport:
        client = client_with(transport, "")
        assert client.get("/livez").status_code == 200
        app.state.dispatcher.close()
        app.state.dispatcher.join()
        assert client.get("/livez").status_code == 500


def test_a_silent_redis_is_a_transient_problem(tmp_path: Path) -> None:
    server = EmbeddedRedis.start(tmp_path / "redis")
    app = create_app(Settings(redis_url=server.url, data=tmp_path))
    with InProcessTransport(app) as transport:
        client = client_with(transport, "")
        server.stop()
        answer = client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["category"] == "transient"
        assert int(answer.headers["retry-after"]) > 0
        assert client.get("/livez").status_code == 200


def test_the_service_recovers_when_redis_comes_back(tmp_path: Path) -> None:
    server = EmbeddedRedis.start(tmp_path / "redis")
    settings = Settings(redis_url=server.url, data=tmp_path)
    backing = Backing.on_redis(settings)
    token = backing.tokens.create("ann")
    with InProcessTransport(create_app(settings)) as transport:
        client = client_with(transport, token)
        server.stop()
        assert client.get("/v1/jobs").status_code == 503
        server = EmbeddedRedis.start(tmp_path / "redis")
        try:
            give_up = time.monotonic() + 60.0
            while (answer := client.get("/v1/jobs")).status_code == 503:
                assert time.monotonic() < give_up
            assert answer.json()["jobs"] == []
        finally:
            server.stop()


def test_nothing_connects_before_the_app_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        port = listener.getsockname()[1]
        create_app(Settings(redis_url=f"redis://127.0.0.1:{port}", data=tmp_path / "data"))
        with pytest.raises(TimeoutError):
            listener.accept()
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("url", [None, "", "http://127.0.0.1"])
def test_an_unusable_redis_is_named_at_once(url: str | None, tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="Redis"):
        create_app(Settings(redis_url=url, data=tmp_path))


def test_the_schema_is_made_once(tmp_path: Path) -> None:
    app = create_app(Settings(data=tmp_path), backing=empty_backing(tmp_path))
    assert app.openapi() is app.openapi()


def test_the_schema_states_what_a_job_may_say(small_box: Box) -> None:
    schemas = small_box.client.get("/openapi.json").json()["components"]["schemas"]
    seed = schemas["GradientSpec"]["properties"]["seed"]
    assert (seed["minimum"], seed["exclusiveMaximum"]) == (0, 2**63)
    priority = schemas["GradientSpec"]["properties"]["priority"]
    assert (priority["minimum"], priority["maximum"]) == (-10, 10)
    assert not {"ge", "gt", "le", "lt"} & set(_keys(schemas))
    for loss in ("GraphLoss", "BuiltinLoss", "CotangentsLoss"):
        assert "kind" in schemas[loss]["required"]


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner)


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/session"), ("PUT", "/v1/operation")])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_large_body_is_refused_before_it_is_parsed(
    small_box: Box, method: str, path: str, *, chunked: bool
) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1024
            yield b" " * 1024

    with httpx.Client(transport=small_box.transport, base_url="http://box") as stranger:
        body = chunks() if chunked else b" " * 10**6
        answer = stranger.request(method, path, content=body)
    assert (answer.status_code, answer.json()["type"]) == (
        413,
        "urn:gradbox:problem:blob-too-large",
    )
    assert answer.headers["x-request-id"] == answer.json()["request_id"]
    assert sent <= 8 * 1024


def test_a_small_body_comes_whole(small_box: Box) -> None:
    token = {"token": "x" * 199}
    headers = {"X-Gradbox-Dashboard": "1"}
    for body in (json.dumps(token).encode(), iter([b'{"token": "', b"x" * 199, b'"}'])):
        answer = small_box.client.post(
            "/v1/session", content=body, headers=headers | {"Content-Type": "application/json"}
        )
        assert answer.status_code == 401, answer.text


def test_the_schema_names_what_is_posted(small_box: Box) -> None:
    document = httpx.Client(transport=small_box.transport, base_url="http://box").get(
        "/openapi.json"
    )
    schemas = document.json()["components"]["schemas"]
    assert document.json()["components"]["securitySchemes"].keys() == {"HTTPBearer", "Session"}
    named = {
        "BoxView",
        "ForwardSpec",
        "GradientSpec",
        "JobView",
        "ModelView",
        "Problem",
        "ProgressView",
    }
    assert named <= schemas.keys()
    body = document.json()["paths"]["/v1/jobs"]["post"]["requestBody"]
    posted = body["content"]["application/json"]["schema"]["anyOf"]
    assert [form["$ref"].rpartition("/")[2] for form in posted] == [
        "JobSpec",
        "CotangentGradientSpec",
    ]
    told_apart = schemas["JobSpec"]["discriminator"]
    assert told_apart["propertyName"] == "computation"
    assert told_apart["mapping"]["mixed_gradient"] == "#/components/schemas/MixedGradientSpec"
    assert told_apart["mapping"]["forward"] == "#/components/schemas/ForwardSpec"
    assert "computation" in schemas["GradientSpec"]["required"]


def test_a_full_disk_is_a_transient_problem_until_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=4 * MIB) as disk:
        server = EmbeddedRedis.start(disk / "redis")
        settings = Settings(redis_url=server.url, data=tmp_path / "data")
        backing = Backing.on_redis(settings)
        announce(backing)
        token = backing.tokens.create("ann")
        try:
            with InProcessTransport(create_app(settings)) as transport:
                client = client_with(transport, token)
                blob = upload(client, SHARDS)
                hog = disk / "hog"
                fill(hog)
                give_up = time.monotonic() + 60.0
                statuses = set()
                while 503 not in statuses:  # Redis notices once it appends
                    answer = client.post("/v1/jobs", json=spec_for(blob))
                    statuses.add(answer.status_code)
                    assert time.monotonic() < give_up
                assert statuses <= {202, 503}
                assert answer.json()["category"] == "transient"
                assert int(answer.headers["retry-after"]) > 0
                assert "full" in answer.json()["detail"]
                assert client.get("/v1/jobs").status_code == 200
                assert client.get("/livez").status_code == 200
                hog.unlink()
                while client.post("/v1/jobs", json=spec_for(blob)).status_code != 202:
                    assert time.monotonic() < give_up
                    time.sleep(0.1)
        finally:
            server.stop()


def fill(hog: Path) -> None:
    with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
