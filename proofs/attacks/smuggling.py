"""Two requests that pretend to be one, and bytes that are none."""

from __future__ import annotations

from functools import partial

from proofs.attacks.attack import attack
from proofs.attacks.requests import BUSY_S, request, statuses
from proofs.attacks.target import Target

_INNER = "GET /v1/models HTTP/1.1\r\nHost: box\r\n\r\n"
SMUGGLED = {
    "a length and chunks": (
        "Content-Length: 4",
        "Transfer-Encoding: chunked",
    ),
    "two lengths": ("Content-Length: 0", f"Content-Length: {len(_INNER)}"),
    "chunks that are not the last coding": ("Transfer-Encoding: chunked, identity",),
    "a coding nobody knows": ("Transfer-Encoding: xchunked",),
    "a blank before the colon": (f"Content-Length : {len(_INNER)}",),
    "a folded header": ("Content-Length: 0", "X: a", f" Content-Length: {len(_INNER)}"),
    "a header without a name": (": 5",),
    "a zero byte in a header": ("X: a\x00b",),
    "a line end in a header": ("X: a\rContent-Length: 5",),
}


def _smuggle(target: Target, lines: tuple[str, ...]) -> None:
    """Send a request whose end is told in two ways, and a second one behind either end."""
    data = request(target, *lines) + b"0\r\n\r\n" + _INNER.encode()
    answer = target.send(data, first_s=0.5, read_s=0.5)
    seen = statuses(answer)
    assert all(400 <= status < 500 for status in seen), answer[:500]
    # The second request has no token: whatever ran it, it was not answered as eve's.
    assert b"num_parameters" not in answer
    assert target.lives() < BUSY_S


for _name, _lines in SMUGGLED.items():
    attack(
        f"smuggling: {_name}",
        tries="a request whose end two readers would see at different places, and one behind it",
        must="400, or a refusal of each; never an answer of the second with the first one's token",
    )(partial(_smuggle, lines=_lines))

ODD = {
    "no version": b"GET /livez\r\n\r\n",
    "a version of its own": b"GET /livez HTTP/9.9\r\nHost: box\r\n\r\n",
    "an address in the line": b"GET http://evil/livez HTTP/1.1\r\nHost: box\r\n\r\n",
    "a tunnel": b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: box\r\n\r\n",
    "a trace": b"TRACE /v1/jobs HTTP/1.1\r\nHost: box\r\nX-Secret: 1\r\n\r\n",
    "bytes": bytes(range(256)) * 4,
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),
    "a chunk of 2**64 bytes": (
        b"POST /v1/jobs HTTP/1.1\r\nHost: box\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"FFFFFFFFFFFFFFFFF\r\n"
    ),
    "a chunk of -1 bytes": (
        b"POST /v1/jobs HTTP/1.1\r\nHost: box\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n"
    ),
}


def _odd(target: Target, data: bytes) -> None:
    answer = target.send(data, first_s=0.3)
    seen = statuses(answer)
    assert all(status < 500 for status in seen), answer[:300]
    assert b"X-Secret" not in answer
    assert b"Traceback" not in answer
    assert target.lives() < BUSY_S


for _name, _data in ODD.items():
    attack(
        f"odd: {_name}",
        tries="what no HTTP client sends",
        must="4xx or a closed connection; others are answered as before",
    )(partial(_odd, data=_data))
