"""Bodies that cost more to refuse than to send."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from proofs.attacks.services import Service, next_status, while_live
from tests.service.boxes import SHARDS, spec_for, upload

MIB = 2**20
LIMIT_BYTES = 8 * MIB
# What all bodies below together may add to the largest size that the service ever had.
ADDED_BYTES = 96 * MIB


def repeated(head: bytes, unit: bytes, tail: bytes, *, size_bytes: int = LIMIT_BYTES) -> bytes:
    times = (size_bytes - len(head) - len(tail)) // len(unit)
    return head + unit * times + tail


def named(head: bytes, value: bytes, tail: bytes, *, count: int) -> bytes:
    entries = b",".join(b'"a%x":%s' % (number, value) for number in range(count))
    return head + entries + tail


GRADIENT = b'{"computation":"gradient","model":"tiny",'
BUILTIN = b'"loss":{"kind":"builtin","name":"x"},'
BODIES: dict[str, Callable[[], bytes]] = {
    "31 MB of lists": lambda: repeated(
        GRADIENT + b'"inputs":[', b"[],", b"[]]}", size_bytes=31 * MIB
    ),
    "lists": lambda: repeated(GRADIENT + b'"inputs":[', b"[],", b"[]]}"),
    "shards": lambda: repeated(GRADIENT + BUILTIN + b'"inputs":[{"shards":[', b"[],", b"[]]}]}"),
    "numbers": lambda: repeated(GRADIENT + b'"wrt":[', b"0,", b"0]}"),
    "depth": lambda: b"[" * LIMIT_BYTES,
    "digits": lambda: repeated(GRADIENT + b'"seed":', b"1", b"}"),
    "spaces": lambda: b" " * LIMIT_BYTES,
    "a name": lambda: repeated(GRADIENT + b'"name":"', b"x", b'"}'),
    # As many as may be parsed.
    "fewer lists": lambda: GRADIENT + b'"inputs":[' + b"[]," * 49_000 + b"[]]}",
    "fewer numbers": lambda: GRADIENT + b'"wrt":[' + b"0," * 99_000 + b"0]}",
    "unknown fields": lambda: named(GRADIENT, b"0", b"}", count=99_000),
    "unknown fields of a shard": lambda: named(
        GRADIENT + b'"inputs":[{"shards":[{', b"0", b"}]}]}", count=99_000
    ),
    "wrong weights": lambda: named(GRADIENT + b'"weights":{', b"[]", b"}}", count=49_000),
    "wrong loss inputs": lambda: named(GRADIENT + b'"loss_inputs":{', b"[]", b"}}", count=49_000),
    "wrong cotangents": lambda: named(
        b'{"computation":"gradient","loss":{"kind":"cotangents","tensors":{',
        b"[]",
        b"}}}",
        count=49_000,
    ),
    "wrong nodes": lambda: (
        GRADIENT
        + b'"loss":{"kind":"graph","function":{"graph":{"nodes":['
        + b"{}," * 49_000
        + b"{}]}}}}"
    ),
}


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    with service.client_of("eve") as client:
        client.post("/v1/jobs", content=b"{}")
        yield client


@pytest.mark.parametrize("body", BODIES)
def test_a_body_is_refused_in_little_time_and_memory(
    service: Service, client: httpx.Client, body: str
) -> None:
    content = BODIES[body]()
    before = service.peak_bytes()
    answer = while_live(service, lambda: client.post("/v1/jobs", content=content))
    assert answer.status_code in (413, 422)
    assert answer.json()["category"] == "user"
    assert len(answer.content) < 2000
    assert service.peak_bytes() - before < ADDED_BYTES


@pytest.mark.parametrize("unit", [b"[],", b"0,", b'{"b":0},'], ids=["lists", "numbers", "objects"])
def test_a_blob_with_a_header_of_16_mib_is_refused_while_the_service_answers(
    service: Service, client: httpx.Client, unit: bytes
) -> None:
    header = repeated(b'{"a":[', unit, b"0]}", size_bytes=16 * MIB)
    blob = len(header).to_bytes(8, "little") + header
    digest = hashlib.sha256(blob).hexdigest()
    before = service.peak_bytes()
    answer = while_live(service, lambda: client.put(f"/v1/blobs/{digest}", content=blob))
    assert answer.status_code == 422
    assert answer.json()["type"] == "urn:gradbox:problem:blob-rejected"
    assert service.peak_bytes() - before < ADDED_BYTES


def test_too_many_values_are_counted_and_said(client: httpx.Client) -> None:
    detail = client.post("/v1/jobs", content=BODIES["lists"]()).json()["detail"]
    assert "expected at most 100000 values" in detail


def test_a_large_job_that_can_run_is_taken_while_the_service_answers(
    service: Service, client: httpx.Client
) -> None:
    blob = upload(client, SHARDS)
    spec = spec_for(blob, inputs=[{"shards": [{"blob": blob, "prefix": "0/"}] * 20_000}])
    answer = while_live(service, lambda: client.post("/v1/jobs", json=spec))
    assert answer.status_code == 202, answer.text


def test_many_large_bodies_at_once_take_the_memory_of_few(service: Service) -> None:
    clients = [service.client_of("eve") for _ in range(12)]
    content = BODIES["spaces"]()
    before = service.peak_bytes()

    def attack() -> set[int]:
        with ThreadPoolExecutor(12) as pool:
            posts = [pool.submit(one.post, "/v1/jobs", content=content) for one in clients]
            return {post.result().status_code for post in posts}

    assert while_live(service, attack) == {422}
    assert service.peak_bytes() - before < 64 * MIB


def test_many_slow_large_bodies_keep_no_other_waiting(service: Service) -> None:
    """A body that is still on its way holds neither memory nor the turn of another."""
    head = (
        "POST /v1/jobs HTTP/1.1\r\nHost: box\r\n"
        f"Authorization: Bearer {service.token_of('eve')}\r\n"
        f"Content-Length: {LIMIT_BYTES}\r\n\r\n"
    ).encode()
    before = service.peak_bytes()
    connections = [service.connect() for _ in range(12)]
    try:
        for connection in connections:
            connection.sendall(head + b" " * (LIMIT_BYTES - 1))
        answer = service.client_of("ann").post("/v1/jobs", content=BODIES["spaces"]())
        assert answer.status_code == 422
        assert service.peak_bytes() - before < 64 * MIB
    finally:
        for connection in connections:
            connection.close()


@pytest.mark.parametrize(
    ("call", "length"),
    [("POST /v1/jobs", LIMIT_BYTES + 1), (f"PUT /v1/blobs/{'0' * 64}", 64 * 2**30 + 1)],
)
def test_a_length_over_the_limit_is_413_before_the_body_comes(
    service: Service, call: str, length: int
) -> None:
    head = (
        f"{call} HTTP/1.1\r\nHost: box\r\nAuthorization: Bearer {service.token_of('eve')}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    )
    with service.connect() as connection:
        connection.sendall(head.encode())
        assert next_status(connection) == 413


def test_a_body_over_the_limit_that_names_no_length_is_413(client: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(9):
            yield b" " * MIB

    assert client.post("/v1/jobs", content=pieces()).status_code == 413
