"""One user's many jobs and requests: refused clearly, and told when to come back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from socket import socket

import httpx
import pytest

from gradbox.errors import QueueFull, TooManyRequests
from gradbox.protocol import Problem
from gradbox_service.settings import Settings
from proofs.attacks.services import Service, running, unread, while_live
from tests.service.boxes import SHARDS, begin, run_job, spec_for, submit, upload

MAX_JOBS = 5
REQUESTS_PER_S = 10
MAX_STREAMS = 3
MAX_TRANSFERS = 3
MIB = 2**20


@pytest.fixture(scope="module")
def service(settings: Settings) -> Iterator[Service]:
    limits = ("--max-queued-jobs", str(MAX_JOBS), "--requests-per-s", str(REQUESTS_PER_S))
    limits += ("--max-event-streams", str(MAX_STREAMS), "--max-transfers", str(MAX_TRANSFERS))
    with running(settings, *limits) as found:
        yield found


def test_a_full_queue_is_said_until_a_job_has_ended(service: Service) -> None:
    client = service.client_of("greedy")
    spec = spec_for(upload(client, SHARDS))
    answers = [client.post("/v1/jobs", json=spec) for _ in range(MAX_JOBS + 1)]
    assert [answer.status_code for answer in answers] == [202] * MAX_JOBS + [429]
    refused = answers[-1]
    assert isinstance(Problem.model_validate(refused.json()).error(), QueueFull)
    assert int(refused.headers["retry-after"]) > 0

    other = service.client_of("modest")
    assert other.post("/v1/jobs", json=spec_for(upload(other, SHARDS))).status_code == 202

    ids = [answer.json()["id"] for answer in answers[:MAX_JOBS]]
    begin(service.backing.records, ids[0])
    assert client.post("/v1/jobs", json=spec).status_code == 429
    run_job(service.backing, ids[1], data=b"")
    assert client.delete(f"/v1/jobs/{ids[2]}").status_code == 202
    statuses = [client.post("/v1/jobs", json=spec).status_code for _ in range(3)]
    assert statuses == [202, 202, 429]


def test_a_repeated_post_is_answered_though_the_queue_is_full(service: Service) -> None:
    client = service.client_of("repeating")
    spec, key = spec_for(upload(client, SHARDS)), {"Idempotency-Key": "once"}
    first = client.post("/v1/jobs", json=spec, headers=key)
    for _ in range(MAX_JOBS):
        client.post("/v1/jobs", json=spec)
    assert client.post("/v1/jobs", json=spec).status_code == 429
    assert client.post("/v1/jobs", json=spec, headers=key).json()["id"] == first.json()["id"]


def test_a_flood_of_one_token_is_refused_and_the_others_are_answered(service: Service) -> None:
    flooding = [service.client_of("flooding")] * 4
    token = flooding[0].headers["Authorization"]

    def flood() -> Counter[int]:
        with ThreadPoolExecutor(4) as pool:
            sent = [pool.submit(flooding[0].get, "/v1/jobs") for _ in range(REQUESTS_PER_S * 12)]
            return Counter(one.result().status_code for one in sent)

    seen = while_live(service, flood)
    assert seen[200] >= 1
    assert seen[429] >= REQUESTS_PER_S
    assert set(seen) == {200, 429}
    refused = next(
        answer
        for answer in (flooding[0].get("/v1/jobs") for _ in range(1000))
        if answer.status_code == 429
    )
    error = Problem.model_validate(refused.json()).error()
    assert isinstance(error, TooManyRequests)
    assert not isinstance(error, QueueFull)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-request-id"] == refused.json()["request_id"]
    assert token not in refused.text
    assert service.client_of("calm").get("/v1/jobs").status_code == 200


def session_of(service: Service, token: str) -> str:
    """Log in as a browser does, and return the cookie."""
    headers = {"X-Gradbox-Dashboard": "1"}
    answer = httpx.post(
        f"{service.url}/v1/session", json={"token": token}, headers=headers, trust_env=False
    )
    return answer.headers["set-cookie"].partition(";")[0]


@pytest.mark.parametrize("by", ["spellings", "junk beside the cookie", "tokens"])
def test_one_user_has_one_allowance(service: Service, by: str) -> None:
    tokens = [service.token_of(f"manifold {by[:4]}".replace(" ", "-")) for _ in range(8)]
    cookie = session_of(service, tokens[0])

    def headers(number: int) -> dict[str, str]:
        if by == "junk beside the cookie":
            return {"Cookie": f"{cookie}; junk={number}"}
        if by == "tokens":
            return {"Authorization": f"Bearer {tokens[number % len(tokens)]}"}
        scheme = "".join(
            letter.upper() if number >> place & 1 else letter
            for place, letter in enumerate("bearer")
        )
        return {"Authorization": f"{scheme} {' ' * (number >> 6)}{tokens[0]}"}

    begun = time.monotonic()
    with httpx.Client(base_url=service.url, trust_env=False) as client:
        answers = [client.get("/v1/jobs", headers=headers(number)) for number in range(150)]
    allowed = [answer.status_code for answer in answers].count(200)
    assert allowed <= (4 + time.monotonic() - begun) * REQUESTS_PER_S
    assert {answer.status_code for answer in answers} == {200, 429}


def test_tokens_of_nobody_count_as_their_address(service: Service) -> None:
    begun = time.monotonic()
    elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
    with httpx.Client(base_url=service.url, transport=elsewhere) as client:
        codes = [
            client.get(
                "/v1/jobs",
                headers={"Authorization": f"Bearer junk{number}", "X-Forwarded-For": f"{number}"},
            ).status_code
            for number in range(100)
        ]
    assert codes.count(401) <= (4 + time.monotonic() - begun) * REQUESTS_PER_S
    assert set(codes) == {401, 429}
    assert service.client_of("here").get("/v1/jobs").status_code == 200


def status(client: httpx.Client) -> int:
    return client.get("/v1/jobs").status_code


def test_one_user_has_so_many_event_streams_and_the_others_theirs(service: Service) -> None:
    client, other = service.client_of("listening"), service.client_of("calm")
    paths = [f"/v1/jobs/{submit(each)}/events" for each in (client, other)]
    with ExitStack() as streams:
        for _ in range(MAX_STREAMS):
            answer = streams.enter_context(client.stream("GET", paths[0]))
            assert answer.status_code == 200
        refused = client.get(paths[0])
        assert refused.status_code == 429
        assert "event streams of yours are open" in refused.json()["detail"]
        with other.stream("GET", paths[1]) as answer:
            assert answer.status_code == 200
    give_up = time.monotonic() + 60.0
    while (again := client.send(client.build_request("GET", paths[0]), stream=True)) and (
        again.status_code == 429
    ):
        assert time.monotonic() < give_up, "closed streams still count"
        time.sleep(0.05)
    again.close()


def slow_upload(service: Service, token: str, *, head: str) -> socket:
    """Begin to send a body."""
    connection = service.connect()
    lines = (f"{head} HTTP/1.1", "Host: box", f"Authorization: Bearer {token}")
    connection.sendall("\r\n".join([*lines, "Content-Length: 100000", "", "{"]).encode())
    return connection


@pytest.mark.parametrize(
    "head", ["", "POST /v1/jobs", "PUT /v1/blobs/" + "0" * 64], ids=["download", "job", "blob"]
)
def test_one_user_has_so_many_transfers_and_the_others_theirs(service: Service, head: str) -> None:
    client, other = service.client_of("hoarding"), service.client_of("calm")
    token = client.headers["Authorization"].partition(" ")[2]
    paths = [f"/v1/jobs/{submit(each)}/result" for each in (client, other)]
    for path in paths:
        run_job(service.backing, path.split("/")[3], data=bytes(4 * MIB))

    def refused() -> bool:
        answer = client.get(paths[0], headers={"Range": "bytes=0-0"})
        if answer.status_code == 206:
            return False
        assert int(answer.headers["retry-after"]) > 0
        return "uploads and downloads of yours are open" in answer.json()["detail"]

    with ExitStack() as open_ones:

        def one_more_is_refused() -> bool:
            transfer = partial(slow_upload, head=head) if head else partial(unread, path=paths[0])
            open_ones.enter_context(transfer(service, token=token))
            return refused()

        until(one_more_is_refused)
        assert other.head(paths[1]).status_code == 200
    until(lambda: not refused())


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.2)  # more would be refused for its rate
