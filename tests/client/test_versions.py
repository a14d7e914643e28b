"""A client that is older than the box, or newer: what still works, and what is said of the rest."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from gradbox import ProtocolError
from gradbox.errors import GradboxError
from tests.boxes import TestBox
from tests.client.wires import client_of, job_view


def answering(status: int = 200, **changes: Any) -> httpx.Response:
    """What a box of another version says of a job."""
    view = json.loads(job_view().model_dump_json()) | changes
    return httpx.Response(status, json=view)


def test_an_older_client_ignores_what_a_newer_box_adds() -> None:
    client = client_of(lambda _: answering(later={"of": ["a", "later", "version"]}))
    assert client.job("j1").view.id == "j1"


def test_an_older_client_asks_which_is_older_where_it_cannot_read_an_answer() -> None:
    client = client_of(lambda _: answering(state="suspended"))
    with pytest.raises(ProtocolError, match="is this client older or newer than the box"):
        client.job("j1")


def test_an_older_client_says_a_newer_boxs_problem_in_the_boxs_words() -> None:
    problem = {
        "type": "urn:gradbox:problem:of-a-later-version",
        "title": "A later version",
        "status": 409,
        "detail": "expected something that only a later client sends; upgrade gradbox",
        "category": "user",
        "later": 1,
    }
    media_type = {"Content-Type": "application/problem+json"}
    client = client_of(lambda _: httpx.Response(409, json=problem, headers=media_type))
    with pytest.raises(GradboxError, match="upgrade gradbox"):
        client.job("j1")


@pytest.mark.parametrize(("field", "value"), [("protocol", 2), ("of_a_later_version", True)])
def test_a_box_names_what_a_newer_client_sends_and_it_does_not_know(
    twin: TestBox, field: str, value: object
) -> None:
    with twin.http() as http:
        answer = http.post("/v1/jobs", json={"computation": "gradient", "model": "m", field: value})
    assert answer.status_code == 422
    assert answer.json()["type"] == "urn:gradbox:problem:invalid-job"
    assert field in answer.json()["detail"]


def test_a_box_says_that_it_has_no_call_which_a_newer_client_makes(twin: TestBox) -> None:
    with twin.http() as http:
        answer = http.get("/v1/of-a-later-version")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
