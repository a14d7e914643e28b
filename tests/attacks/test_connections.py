"""Heads without end, requests never finished, answers never read: nobody waits for the others."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from gradbox_service.settings import Settings
from proofs.attacks.services import (
    Service,
    answer_of,
    next_status,
    running,
    status_of,
    unread,
    while_live,
)
from tests.service.boxes import run_job, submit

KIB, MIB = 2**10, 2**20
HEAD = b"GET /livez HTTP/1.1\r\nHost: box\r\n"
HEAD_LIMIT_BYTES = 64 * KIB
PACE_BYTES = 64 * KIB
RESULT_BYTES = 4 * MIB
ESTABLISHED = "01"


def is_held(connection: socket.socket) -> bool:
    """Tell whether the service has not closed its end, whatever is still to be read on ours."""
    port = f":{connection.getsockname()[1]:04X}"
    ends = [line.split()[2:4] for line in Path("/proc/net/tcp").read_text().splitlines()]
    return any(end.endswith(port) and state == ESTABLISHED for end, state in ends)


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
        connection.sendall(post_head(service, length=6 * PACE_BYTES))
        for _ in range(6):  # longer in all than so much of a body may take
            time.sleep(0.4)
            connection.sendall(b" " * PACE_BYTES)
        assert next_status(connection) == 422


@pytest.mark.parametrize("call", ["POST /v1/jobs", "PUT /v1/blobs/" + "0" * 64])
def test_a_body_that_dribbles_is_given_up(service: Service, call: str) -> None:
    head = post_head(service, length=MIB).replace(b"POST /v1/jobs", call.encode())
    begun = time.monotonic()
    with service.connect() as connection, suppress(ConnectionError):
        connection.sendall(head)
        while not (answer := answer_of(connection, within_s=0.2)):
            assert time.monotonic() - begun < 30.0
            connection.sendall(b" ")
    assert status_of(answer) == 408


@pytest.fixture(scope="module")
def result(service: Service) -> tuple[str, str]:
    """The path of a result that no kernel takes whole, and its owner's token."""
    job_id = submit(service.client_of("ann"))
    run_job(service.backing, job_id, data=os.urandom(RESULT_BYTES))
    return f"/v1/jobs/{job_id}/result", service.token_of("ann")


def files_of_results(service: Service) -> list[str]:
    """Return the result files that the service has open."""
    folder = f"/proc/{service.process.pid}/fd"
    found = []
    for number in os.listdir(folder):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"{folder}/{number}"))
    return [name for name in found if "/results/" in name]


@pytest.mark.parametrize(
    ("path", "num_requests"), [("", 1), ("/openapi.json", 200)], ids=["a download", "many answers"]
)
def test_an_answer_that_is_not_read_is_given_up(
    service: Service, result: tuple[str, str], path: str, num_requests: int
) -> None:
    begun = time.monotonic()
    with unread(service, path or result[0], result[1], num_requests=num_requests) as connection:
        time.sleep(1.0)
        assert len(files_of_results(service)) == (0 if path else 1)  # and it is open once
        while is_held(connection) or files_of_results(service):
            assert time.monotonic() - begun < 30.0
            time.sleep(0.05)
        received_bytes = len(answer_of(connection))
    assert time.monotonic() - begun > 2.0
    assert 0 < received_bytes < RESULT_BYTES


def test_an_answer_that_is_read_slowly_is_sent_whole(
    service: Service, result: tuple[str, str]
) -> None:
    with unread(service, *result) as connection:
        received_bytes = 0
        for _ in range(10):  # longer in all than so much of an answer may wait
            time.sleep(0.4)
            for _ in range(30):
                received_bytes += len(connection.recv(PACE_BYTES))
        received_bytes += len(answer_of(connection, within_s=1.5))
    assert received_bytes > RESULT_BYTES


def test_who_pipelines_and_hangs_up_leaves_no_traceback(
    settings: Settings, result: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    log, give_up = "", time.monotonic() + 60.0
    with running(settings) as service:  # its log comes here
        for _ in range(3):
            with unread(service, *result, num_requests=5):
                time.sleep(0.1)  # the first answer is on its way
        while log.count(f"path={result[0]}") < 3 or files_of_results(service):
            assert time.monotonic() < give_up, log
            log += capfd.readouterr().err
            time.sleep(0.05)
    assert "Traceback" not in log + capfd.readouterr().err


def test_no_file_left_to_open_is_503(service: Service, result: tuple[str, str]) -> None:
    client = service.client_of("ann")
    assert client.head(result[0]).status_code == 200
    process = service.process.pid
    before = resource.prlimit(process, resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir(f"/proc/{process}/fd")))
    free = min(set(range(len(taken) + 1)) - taken)
    resource.prlimit(process, resource.RLIMIT_NOFILE, (free, before[1]))
    refused = client.get(result[0])
    resource.prlimit(process, resource.RLIMIT_NOFILE, before)
    assert refused.status_code == 503
    assert refused.json()["category"] == "transient"
    assert "files and connections" in refused.json()["detail"]
    assert int(refused.headers["retry-after"]) > 0
    assert client.get(result[0]).status_code == 200


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
