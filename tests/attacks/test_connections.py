"""Heads without end, requests that are never finished: nobody is kept waiting for the others."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress

import pytest

from tests.attacks.services import Service, answer_of, next_status, status_of, while_live
from tests.service.boxes import submit

KIB, MIB = 2**10, 2**20
HEAD = b"GET /livez HTTP/1.1\r\nHost: box\r\n"
HEAD_LIMIT_BYTES = 64 * KIB


def ask(service: Service, *parts: bytes) -> bytes:
    """Send these bytes on a connection of their own, and return what comes back."""
    with service.connect() as connection:
        with suppress(ConnectionError):  # a service that has answered need not read on
            for part in parts:
                connection.sendall(part)
        return answer_of(connection)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def problem_of(answer: bytes) -> dict[str, object]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head
    found: dict[str, object] = json.loads(body)
    return found


def test_a_header_of_120_mb_is_431_and_freezes_nobody(service: Service) -> None:
    def attack() -> bytes:
        return ask(service, HEAD, b"X-Big: ", *[b"a" * MIB] * 120)

    answer = while_live(service, attack)
    assert status_of(answer) == 431
    assert problem_of(answer)["type"] == "urn:gradbox:problem:headers-too-large"
    assert b"connection: close" in answer


def test_many_headers_are_431_and_freeze_nobody(service: Service) -> None:
    def attack() -> bytes:
        return ask(service, HEAD, *[b"a: b\r\n" * 10_000] * 300)

    assert status_of(while_live(service, attack)) == 431


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez?" + b"a" * HEAD_LIMIT_BYTES + b" HTTP/1.1\r\nHost: box\r\n\r\n",
        HEAD + b"X-Big: " + b"a" * HEAD_LIMIT_BYTES + b"\r\n\r\n",
        HEAD + b"a: b\r\n" * (HEAD_LIMIT_BYTES // 6) + b"\r\n",
    ],
    ids=["target", "one header", "many headers"],
)
def test_a_head_that_comes_at_once_is_431_too(service: Service, head: bytes) -> None:
    assert status_of(ask(service, head)) == 431


def test_a_head_below_the_limit_is_answered(service: Service) -> None:
    whole = HEAD + b"X-Big: " + b"a" * (60 * KIB) + b"\r\nConnection: close\r\n\r\n"
    assert status_of(ask(service, whole)) == 200
    assert status_of(ask(service, whole[:30_000], whole[30_000:])) == 200


@pytest.mark.parametrize(
    "endless",
    [b"\r\n" * 500_000, b"X-Trailer: " + b"a" * 10 * MIB],
    ids=["line ends", "a trailer"],
)
def test_what_the_parser_makes_nothing_of_is_cut_off(service: Service, endless: bytes) -> None:
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" if endless[:1] == b"X" else b""

    def attack() -> bool:
        with service.connect() as connection:
            with suppress(ConnectionError):
                connection.sendall(head + endless)
            answer_of(connection)
            return is_closed(connection)

    assert while_live(service, attack)


def test_trailers_do_not_join_the_headers(service: Service) -> None:
    head = HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    trailer = b"X-Request-ID: from-a-trailer\r\n\r\n"
    answer = ask(service, head, b"1\r\nx\r\n0\r\n" + trailer)
    assert status_of(answer) == 200
    assert b"from-a-trailer" not in answer


def test_what_is_no_http_is_a_problem(service: Service) -> None:
    answer = ask(service, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n")
    assert status_of(answer) == 400
    assert problem_of(answer)["type"] == "urn:gradbox:problem:bad-request"


def seconds_until_closed(connection: socket.socket) -> tuple[float, bytes]:
    begun = time.monotonic()
    answer = answer_of(connection)
    return time.monotonic() - begun, answer


@pytest.mark.parametrize("sent", [b"", b"\r\n", HEAD], ids=["nothing", "a line end", "half"])
def test_a_request_that_does_not_come_is_given_up(service: Service, sent: bytes) -> None:
    with service.connect() as connection:
        connection.sendall(sent)
        seconds, answer = seconds_until_closed(connection)
    assert status_of(answer) == 408
    assert 0.5 < seconds < 30.0


def test_a_head_that_trickles_is_given_up(service: Service) -> None:
    begun = time.monotonic()
    with service.connect() as connection, suppress(ConnectionError):
        connection.sendall(HEAD)
        while time.monotonic() - begun < 60.0:
            connection.sendall(b"x: y\r\n")
            if answer_of(connection, within_s=0.2):
                break
    assert time.monotonic() - begun < 30.0


def test_a_second_request_that_is_never_finished_is_given_up(service: Service) -> None:
    with service.connect() as connection:
        connection.sendall(HEAD + b"\r\n")
        assert next_status(connection) == 200
        connection.sendall(HEAD)
        seconds, answer = seconds_until_closed(connection)
    assert status_of(answer) == 408
    assert seconds < 30.0


def post_head(service: Service, *, length: int) -> bytes:
    return (
        "POST /v1/jobs HTTP/1.1\r\nHost: box\r\n"
        f"Authorization: Bearer {service.token_of('eve')}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def test_a_silent_body_is_given_up(service: Service) -> None:
    with service.connect() as connection:
        connection.sendall(post_head(service, length=1000) + b"{")
        seconds, answer = seconds_until_closed(connection)
    assert status_of(answer) == 408
    assert "more of its body" in str(problem_of(answer)["detail"])
    assert 0.5 < seconds < 30.0


@pytest.mark.parametrize("chunks", [b"zz\r\n{}\r\n", b"2\r\n{}XX", b"2\r\n{}\r\n", b""])
@pytest.mark.parametrize("call", [b"POST /v1/jobs", b"PUT /v1/blobs/" + b"0" * 64])
def test_chunks_that_cannot_be_read_are_a_problem(
    service: Service, call: bytes, chunks: bytes
) -> None:
    token = service.token_of("eve").encode()
    head = b" HTTP/1.1\r\nHost: box\r\nAuthorization: Bearer " + token
    with service.connect() as connection:
        connection.sendall(call + head + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        time.sleep(0.2)  # the app reads the body
        connection.sendall(b"no size\r\n")
        answer = answer_of(connection)
    assert status_of(answer) == 400
    assert problem_of(answer)["type"] == "urn:gradbox:problem:bad-request"


def test_the_answer_under_way_is_not_followed_by_a_refusal(service: Service) -> None:
    job_id = submit(service.client_of("ann"))
    token = service.token_of("ann").encode()
    head = f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: box\r\nAuthorization: Bearer ".encode()
    with service.connect() as connection:
        connection.sendall(head + token + b"\r\n\r\n")
        assert status_of(connection.recv(1000)) == 200
        connection.sendall(b"no request\r\n\r\n")
        assert b"HTTP/1.1" not in answer_of(connection)


def test_a_slow_body_is_waited_for(service: Service) -> None:
    with service.connect() as connection:
        connection.sendall(post_head(service, length=6))
        for _ in range(6):  # longer in all than a body may be silent
            time.sleep(0.4)
            connection.sendall(b" ")
        assert next_status(connection) == 422


def test_hundreds_of_unfinished_requests_keep_nobody_waiting(service: Service) -> None:
    connections = [service.connect() for _ in range(300)]
    try:
        for connection in connections:
            connection.sendall(HEAD + b"x: ")
        while_live(service, lambda: time.sleep(0.5))
        assert {status_of(answer_of(connection)) for connection in connections[::50]} == {408}
    finally:
        for connection in connections:
            connection.close()


def test_a_response_that_streams_for_long_is_not_given_up(service: Service) -> None:
    client = service.client_of("ann")
    job_id = submit(client)
    with client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        lines = answer.iter_lines()
        assert next(lines)
        time.sleep(2.5)
        service.client_of("ann").delete(f"/v1/jobs/{job_id}")
        assert any('"state":"cancelled"' in line for line in lines)
