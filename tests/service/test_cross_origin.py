"""What pages of other origins may do: nothing, but for those that the box's owner names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gradbox_service.settings import Settings
from tests.service.conftest import Box, client_with, serve
from tests.valkey import empty_backing

ORIGIN = "https://lab.example.org"
ALLOW = "access-control-allow-origin"
# Headers that a page reads of any answer (Fetch, section 2.2.2), and the one that no page reads.
READ_BY_ALL = {"Last-Modified", "Set-Cookie"}


@pytest.fixture
def open_box(tmp_path: Path) -> Iterator[Box]:
    settings = Settings(data=tmp_path, cors_origin=("https://other.example.org", ORIGIN))
    yield from serve(empty_backing(tmp_path), settings)


def asked_first(
    box: Box, *headers: str, origin: str = ORIGIN, method: str = "POST"
) -> httpx.Response:
    """Ask as a browser does before it sends a page's request."""
    asked = {"Origin": origin, "Access-Control-Request-Method": method}
    if headers:
        asked["Access-Control-Request-Headers"] = ",".join(sorted(headers)).lower()
    return client_with(box.transport, "").options("/v1/jobs", headers=asked)


def test_a_page_may_send_and_read_all_that_the_schema_names(open_box: Box) -> None:
    schema = open_box.client.get("/openapi.json").json()
    calls = [call for methods in schema["paths"].values() for call in methods.values()]
    sent = {p["name"] for c in calls for p in c.get("parameters", ()) if p["in"] == "header"}
    assert sent >= {"prefer", "range", "last-event-id"}
    answer = asked_first(open_box, "authorization", *sent - {"x-gradbox-dashboard"})
    assert (answer.status_code, answer.headers[ALLOW]) == (200, ORIGIN)
    for method in {method.upper() for methods in schema["paths"].values() for method in methods}:
        assert asked_first(open_box, method=method).status_code == 200
    read = {name for c in calls for r in c["responses"].values() for name in r.get("headers", ())}
    answer = open_box.client.get("/v1/jobs", headers={"Origin": ORIGIN})
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert read - READ_BY_ALL <= set(exposed)
    assert "Retry-After" in read


def test_no_page_sends_what_the_dashboard_does(open_box: Box) -> None:
    refused = asked_first(open_box, "x-gradbox-dashboard")
    assert refused.status_code == 400
    assert "access-control-allow-credentials" not in asked_first(open_box, "prefer").headers


@pytest.fixture
def slow_box(tmp_path: Path) -> Iterator[Box]:
    settings = Settings(data=tmp_path, cors_origin=(ORIGIN,), requests_per_s=1)
    yield from serve(empty_backing(tmp_path), settings)


def test_a_page_reads_refusals_too(slow_box: Box) -> None:
    stranger = client_with(slow_box.transport, "gbx_no")
    refused = stranger.get("/v1/jobs", headers={"Origin": ORIGIN})
    assert (refused.status_code, refused.headers[ALLOW]) == (401, ORIGIN)
    while refused.status_code == 401:
        refused = stranger.get("/v1/jobs", headers={"Origin": ORIGIN})
    assert (refused.status_code, refused.headers[ALLOW]) == (429, ORIGIN)


def test_other_pages_get_nothing(open_box: Box, small_box: Box) -> None:
    elsewhere = "https://elsewhere.example.org"
    assert ALLOW not in asked_first(open_box, origin=elsewhere).headers
    assert ALLOW not in open_box.client.get("/v1/jobs", headers={"Origin": elsewhere}).headers
    assert asked_first(small_box).status_code == 405  # as without a browser
    assert ALLOW not in small_box.client.get("/v1/jobs", headers={"Origin": ORIGIN}).headers
