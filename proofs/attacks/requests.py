"""Requests that no client sends: sizes, half sentences, and two requests that pretend to be one."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from proofs.attacks.attack import attack
from proofs.attacks.target import SUM, Target, graph_loss, own_box, refused

MIB = 2**20
# What an answer may take on a machine that is busy with other things too. The bounds of 0.1 s are
# measured by the service's own processor time, in test_bodies and test_connections.
BUSY_S = 10.0


def request(target: Target, *lines: str, path: str = "/v1/jobs", method: str = "POST") -> bytes:
    head = [f"{method} {path} HTTP/1.1", "Host: box", f"Authorization: Bearer {_token(target)}"]
    return "\r\n".join([*head, *lines, "", ""]).encode()


def _token(target: Target) -> str:
    return target.box.tokens["eve"]


def statuses(answer: bytes) -> list[int]:
    """Return the status of every answer in what came back."""
    lines = answer.split(b"\r\n")
    return [int(line.split()[1]) for line in lines if line.startswith(b"HTTP/1.1 ")]


# --- sizes ---------------------------------------------------------------------------------------


@attack(
    "request: headers of 100 kB",
    tries="a request with one header of 100 kB, and one with 2,000 headers",
    must="431, and the connection closes; without a token too",
)
def _long_headers(target: Target) -> None:
    for headers in ("X: " + "a" * 100_000, "\r\n".join(f"X{n}: {'a' * 50}" for n in range(2000))):
        answer = target.send(f"GET /livez HTTP/1.1\r\nHost: box\r\n{headers}\r\n\r\n".encode())
        assert statuses(answer) == [431], answer[:200]


@attack(
    "request: a header that never ends",
    tries="40 MB of one header, without a token, while others ask /livez",
    must="431 or a closed connection; the service keeps none of it, and /livez answers meanwhile",
    slow=True,
)
def _endless_header(target: Target) -> None:
    (service,) = target.box.processes("service")
    before = _peak_begins(service.pid)
    answer = b""

    def flood() -> None:
        nonlocal answer
        header = b"GET /livez HTTP/1.1\r\nHost: box\r\nX: " + b"a" * (40 * MIB)
        answer = target.send(header + b"\r\n\r\n")

    slowest = target.slowest_while(flood)
    assert statuses(answer) in ([431], []), answer[:200]
    taken = _resident_bytes(service.pid, peak=True) - before
    assert taken < 20 * MIB, f"the service took {taken / MIB:.0f} MB"
    assert slowest < BUSY_S, f"/livez took {slowest:.2f} s"


@attack(
    "request: a body that is announced too large",
    tries="a job with Content-Length 10 GB, and one of -1, 1e9 and nothing",
    must="413 before any of it is read; 4xx for what is no number",
)
def _announced(target: Target) -> None:
    answer = target.send(request(target, "Content-Length: 10000000000"))
    assert statuses(answer) == [413], answer[:200]
    for length in ("-1", "1e9", "0x10", "5, 6"):
        answer = target.send(request(target, f"Content-Length: {length}"))
        assert statuses(answer) == [400] or answer == b"", (length, answer[:200])


@attack(
    "request: a spec above 8 MB",
    tries="a job of 9 MB of blanks, with and without Content-Length",
    must="413",
)
def _large_spec(target: Target) -> None:
    body = b" " * (9 * MIB)
    refused(target.eve.post("/v1/jobs", content=body), "blob-too-large", status=413)
    chunks = (body[begin : begin + MIB] for begin in range(0, len(body), MIB))
    refused(target.eve.post("/v1/jobs", content=chunks), "blob-too-large", status=413)


@attack(
    "request: a million empty lists",
    tries="a job of 7 MB whose inputs are [],[],[],…",
    must="4xx; the service takes at most 300 MB for it, and /livez answers meanwhile",
    slow=True,
)
def _empty_lists(target: Target) -> None:
    body = b'{"computation":"gradient","model":"plain","inputs":[' + b"[]," * 2_300_000 + b"[]]}"
    (service,) = target.box.processes("service")
    before = _peak_begins(service.pid)
    answers = []

    def post() -> None:
        answers.append(target.eve.post("/v1/jobs", content=body, timeout=120.0))

    slowest = target.slowest_while(post)
    assert 400 <= answers[0].status_code < 500, answers[0].status_code
    taken = _resident_bytes(service.pid, peak=True) - before
    assert taken < 300 * MIB, f"the service took {taken / MIB:.0f} MB"
    assert slowest < BUSY_S, f"/livez took {slowest:.2f} s"


BOUNDARY = "cut-here"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


def _part(name: str, content: bytes, *lines: str) -> bytes:
    head = [f"--{BOUNDARY}", f'Content-Disposition: form-data; name="{name}"', *lines, "", ""]
    return "\r\n".join(head).encode() + content + b"\r\n"


@attack(
    "request: parts that lie",
    tries="a job with a blob under the digest of another, and one whose part says it is larger",
    must="422; nothing is stored under that digest, and the part's own headers count for nothing",
)
def _lying_parts(target: Target) -> None:
    job, end = _part("job", b"{}"), f"--{BOUNDARY}--\r\n".encode()
    digest = hashlib.sha256(b"what eve wants to be taken for").hexdigest()
    for lines in ((), ("Content-Length: 10000000000",)):
        body = job + _part(digest, b"what eve sends", *lines) + end
        refused(target.eve.post("/v1/jobs", content=body, headers=FORM))
        assert target.eve.head(f"/v1/blobs/{digest}").status_code == 404


@attack(
    "request: thousands of parts",
    tries="1 MB of empty parts, of one part's headers, and a part larger than all may be",
    must="422 or 413 within the time of any other request",
)
def _many_parts(target: Target) -> None:
    parts = b"".join(_part(f"{number:064x}", b"") for number in range(8000))
    headers = _part("job", b"{}", *(f"X-{number}: x" for number in range(60_000)))
    for body in (parts, headers, _part("job", b" " * (2 * MIB))):
        began = time.monotonic()
        answer = target.eve.post("/v1/jobs", content=body, headers=FORM)
        assert answer.status_code in (413, 422), answer.status_code
        assert time.monotonic() - began < BUSY_S


def _peak_begins(pid: int) -> int:
    """Forget the peak that the process has had, and return what it has resident, in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _resident_bytes(pid)


def _resident_bytes(pid: int, *, peak: bool = False) -> int:
    field = "VmHWM:" if peak else "VmRSS:"
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc")


# --- silence -------------------------------------------------------------------------------------


def _closes_when_silent(target: Target, begin: Callable[[Target], bytes]) -> None:
    limits = {"GRADBOX_HEAD_TIMEOUT_S": "2", "GRADBOX_BODY_TIMEOUT_S": "2"}
    with (
        own_box(environment=limits) as own,
        socket.create_connection(("127.0.0.1", own.box.port)) as connection,
    ):
        connection.settimeout(8.0)
        connection.sendall(begin(own))
        try:
            while connection.recv(65536):
                pass
        except TimeoutError:
            raise AssertionError("the connection is open after 8 s of silence") from None
        except ConnectionError:
            pass


for _name, _begin in {
    "headers": lambda target: b"GET /livez HTTP/1.1\r\nHost: box\r\nX: half",
    "a body": lambda target: request(target, "Content-Length: 100") + b'{"comp',
    "chunks": lambda target: request(target, "Transfer-Encoding: chunked") + b"5\r\n{",
}.items():
    attack(
        f"request: {_name} half sent",
        tries="a request that stops in the middle, on a connection that stays open",
        must="the connection is closed after the limit (30 s for headers, 60 s for a body; here 2)",
        slow=True,
    )(partial(_closes_when_silent, begin=_begin))


@attack(
    "request: a thousand connections that say nothing",
    tries="1,000 open connections without a byte",
    must="others are answered as before",
)
def _silent_connections(target: Target) -> None:
    connections = []
    try:
        for _ in range(1000):
            connections.append(socket.create_connection(("127.0.0.1", target.box.port)))
        assert target.lives() < BUSY_S
        target.still_works()
    finally:
        for connection in connections:
            connection.close()


@attack(
    "request: downloads that nobody reads",
    tries="400 downloads of 64 MB by one user, of which not a byte is read",
    must="429 for most; the service takes 100 MB for them at most, others' jobs run, and after the "
    "limit (60 s; here 5) none is open",
    slow=True,
)
def _unread_downloads(target: Target) -> None:
    with ExitStack() as stack:
        patience = {"GRADBOX_BODY_TIMEOUT_S": "5"}
        own = stack.enter_context(own_box(models=["plain", "wide"], environment=patience))
        job = own.job(own.eve, model="wide")
        assert own.ended(own.eve, job)["state"] == "done"
        own.still_works()
        (service,) = own.box.processes("service")
        before = _peak_begins(service.pid)
        ask = request(own, path=f"/v1/jobs/{job}/result", method="GET")
        connections = []
        for _ in range(400):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", own.box.port)))
            connection.sendall(ask)
            connections.append(connection)
        own.still_works()
        begun = time.monotonic()
        while _files_of_results(service.pid):
            assert time.monotonic() - begun < 60.0
            time.sleep(0.1)
        taken = _resident_bytes(service.pid, peak=True) - before
        assert taken < 100 * MIB, f"the service took {taken / MIB:.0f} MB"
        codes = [statuses(connection.recv(64)) for connection in connections]
        assert codes.count([429]) >= 300, codes.count([429])
        assert own.eve.head(f"/v1/jobs/{job}/result").status_code == 200


def _files_of_results(pid: int) -> list[Path]:
    return [
        file for file in Path(f"/proc/{pid}/fd").iterdir() if "/results/" in str(file.resolve())
    ]


# --- parameters ----------------------------------------------------------------------------------


@attack(
    "request: a thousand ranges",
    tries="Range with 1,000 overlapping parts of a result",
    must="refused, or no more bytes than two results",
)
def _many_ranges(target: Target) -> None:
    job = target.job(target.eve)
    target.ended(target.eve, job)
    path = f"/v1/jobs/{job}/result"
    whole = len(target.eve.get(path).content)
    for spans in (["0-"] * 1000, [f"{n}-" for n in range(1000)], ["0-0"] * 1000, ["-1"] * 1000):
        answer = target.eve.get(path, headers={"Range": "bytes=" + ",".join(spans)})
        assert answer.status_code in (200, 206, 400, 416), answer.status_code
        assert len(answer.content) <= 2 * whole, f"{len(answer.content)} bytes of {whole}"


@attack(
    "request: parameters that mean nothing",
    tries="limits of 10**30 and -1, states with zero bytes, event ids that are none",
    must="4xx or a sensible answer, never a 5xx",
)
def _parameters(target: Target) -> None:
    job = target.job(target.eve)
    target.ended(target.eve, job)
    for query in (
        "limit=1" + "0" * 30,
        "limit=-1",
        "limit=NaN",
        "state=%00",
        "state=" + "a" * 9000,
    ):
        assert target.eve.get(f"/v1/jobs?{query}").status_code in (400, 414, 422), query
    for event in ("x", "-1", "9" * 40, "1-2-3", "0-0'", "$", "+", "(0"):
        headers = {"Last-Event-ID": event}
        with target.eve.stream("GET", f"/v1/jobs/{job}/events", headers=headers) as answer:
            assert answer.status_code < 500, event
    for tag in ("*", '"' + "a" * 9000 + '"', "W/"):
        answer = target.eve.get(f"/v1/jobs/{job}/result", headers={"If-None-Match": tag})
        assert answer.status_code in (200, 304, 400, 431)


NO_NUMBERS = {
    "timeout_s": [True, 0, -1, 1e400, [], None],
    "priority": [True, 11, -11, 1.5, 10**30],
    "seed": [1.5, 10**40, True],
}


@attack(
    "request: numbers that are none",
    tries="timeout_s, priority and seed that are true, lists, negative, infinite, huge",
    must="422 invalid-job that names the field",
)
def _no_numbers(target: Target) -> None:
    spec = target.spec(target.eve)
    for name, values in NO_NUMBERS.items():
        for value in values:
            body = json.dumps({**spec, name: value}).replace("Infinity", "1e400")
            answer = target.eve.post("/v1/jobs", content=body)
            assert answer.status_code == 422, f"{name}={value!r} was answered {answer.status_code}"
            assert name in answer.json()["detail"]


@attack(
    "request: a later protocol",
    tries="a job of protocol 2, and one with a field of a later version",
    must="422 that names the protocol, or the field",
)
def _later(target: Target) -> None:
    assert "protocol" in refused(target.post(target.eve, protocol=2), "invalid-job")
    assert "sharding" in refused(target.post(target.eve, sharding="auto"), "invalid-job")


@attack(
    "request: a spec that is deep or wide",
    tries="10,000 nested lists, 20,000 blobs, 5,000 groups, a glob of 100,000 stars",
    must="422 within a second for each, on a machine at rest",
)
def _deep_spec(target: Target) -> None:
    spec = target.spec(target.eve)
    deep = json.dumps({**spec, "seed": "SEED"}).replace('"SEED"', "[" * 10_000 + "]" * 10_000)
    group = spec["inputs"][0]
    for body in (
        deep,
        json.dumps(
            {**spec, "inputs": [{"shards": [{"blob": f"{n:064x}"} for n in range(20_000)]}]}
        ),
        json.dumps({**spec, "inputs": [{**group, "name": f"g{n}"} for n in range(5_000)]}),
        json.dumps({**spec, "wrt": ["*" * 100_000 + "x"]}),
        json.dumps({**spec, "wrt": ["*a" * 40 + "b"]}),
        json.dumps({**spec, "loss": graph_loss(SUM, returns=[[]] * 100_000)}),
    ):
        begin = time.monotonic()
        answer = target.eve.post("/v1/jobs", content=body)
        assert answer.status_code in (413, 422), answer.text[:300]
        assert time.monotonic() - begin < BUSY_S
    assert target.lives() < BUSY_S
