"""Answers that wait for a job's end (`Prefer: wait=N`): nobody waits at the cost of the others."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest

from gradbox_service.settings import Settings
from proofs.attacks.services import Service, answer_of, running, status_of
from tests.service.boxes import run_job, submit

# More than the service has threads for requests.
MANY_WAITS = 60
MAX_STREAMS = 60
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def service(settings: Settings) -> Iterator[Service]:
    with running(settings, "--max-event-streams", str(MAX_STREAMS)) as service:
        yield service


def wait_for(service: Service, job_id: str, token: str, *, wait_s: int = 30) -> socket.socket:
    """Ask for a job's end, on a connection of its own."""
    connection = service.connect()
    lines = (
        f"GET /v1/jobs/{job_id} HTTP/1.1",
        "Host: box",
        f"Authorization: Bearer {token}",
        f"Prefer: wait={wait_s}",
        "Connection: close",
    )
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    return connection


def client_with(service: Service, token: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=service.url, headers=headers, timeout=60.0, trust_env=False)


def waits(client: httpx.Client, job_id: str) -> bool:
    """Tell whether the service would wait for this client a moment."""
    answer = client.get(f"/v1/jobs/{job_id}", headers={"Prefer": "wait=1"})
    assert answer.status_code == 200
    return "Preference-Applied" in answer.headers


def test_waits_hold_no_thread_and_all_learn_of_the_end(service: Service) -> None:
    token = service.token_of("patient")
    with ExitStack() as stack, client_with(service, token) as client:
        job_id = submit(client)
        waiting = [stack.enter_context(wait_for(service, job_id, token)) for _ in range(MANY_WAITS)]
        assert client.get(f"/v1/jobs/{job_id}").json()["state"] == "queued"
        run_job(service.backing, job_id, data=b"{}")
        answers = [answer_of(connection) for connection in waiting]
    assert {status_of(answer) for answer in answers} == {200}
    assert all(b'"state":"done"' in answer for answer in answers)


def test_who_has_gone_is_not_waited_for(service: Service) -> None:
    token = service.token_of("restless")
    with client_with(service, token) as client:
        job_id = submit(client)
        with ExitStack() as stack:
            for _ in range(MAX_STREAMS):
                stack.enter_context(wait_for(service, job_id, token))
            while waits(client, job_id):  # until as many wait as may
                stack.enter_context(wait_for(service, job_id, token))
        until(lambda: waits(client, job_id))
        assert client.get(f"/v1/jobs/{job_id}").json()["state"] == "queued"


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)
