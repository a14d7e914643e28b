"""The in-process transport streams like a network."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.inprocess import InProcessTransport


class App:
    """An ASGI app of a few answers that notes what happens to it."""

    def __init__(self, *, broken_start: bool = False) -> None:
        self.seen: list[str] = []
        self.received = 0
        self._broken_start = broken_start

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["path"] == "/broken":
            raise ZeroDivisionError
        elif scope["path"] == "/silent":
            return
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await getattr(self, scope["path"][1:])(receive, send)

    async def _lifespan(self, receive: Any, send: Any) -> None:
        while True:
            kind = (await receive())["type"]
            self.seen.append(kind)
            if self._broken_start:
                await send({"type": f"{kind}.failed", "message": "no disk"})
                return
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return

    async def echo(self, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            self.received += len(message["body"])
            more = message["more_body"]
            await send({"type": "http.response.body", "body": message["body"], "more_body": more})

    async def endless(self, receive: Any, send: Any) -> None:
        async def tick() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"tick", "more_body": True})
                self.received += 1

        ticking = asyncio.create_task(tick())
        while (await receive())["type"] != "http.disconnect":
            pass
        ticking.cancel()
        self.seen.append("disconnect")


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def client(app: App) -> Iterator[httpx.Client]:
    with InProcessTransport(app) as transport:
        yield httpx.Client(transport=transport, base_url="http://app")


def test_bodies_stream_both_ways(app: App, client: httpx.Client) -> None:
    sent = 0

    def body() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(200):
            sent += 1000
            yield bytes(1000)

    with client.stream("POST", "/echo", content=body()) as answer:
        chunks = answer.iter_raw()
        next(chunks)
        assert sent < 100_000, "the first answer came before the body had been sent"
        assert sum(map(len, chunks)) == 199_000


def test_a_slow_reader_holds_the_app_back(app: App, client: httpx.Client) -> None:
    with client.stream("GET", "/endless") as answer:
        next(answer.iter_raw())
        time.sleep(0.1)
        assert app.received < 20


def test_the_app_learns_that_the_reader_has_gone(app: App, client: httpx.Client) -> None:
    with client.stream("GET", "/endless") as answer:
        next(answer.iter_raw())
    assert app.seen[-1] == "disconnect"


def test_requests_run_side_by_side(client: httpx.Client) -> None:
    with client.stream("GET", "/endless"):
        done = threading.Event()

        def other() -> None:
            assert client.post("/echo", content=b"x").content == b"x"
            done.set()

        threading.Thread(target=other, daemon=True).start()
        assert done.wait(60.0)


def test_what_the_app_raises_is_raised_here(client: httpx.Client) -> None:
    with pytest.raises(ZeroDivisionError):
        client.get("/broken")
    with pytest.raises(httpx.RemoteProtocolError):
        client.get("/silent")


def test_the_lifespan_begins_and_ends(app: App) -> None:
    transport = InProcessTransport(app)
    assert app.seen == ["lifespan.startup"]
    transport.close()
    transport.close()
    assert app.seen == ["lifespan.startup", "lifespan.shutdown"]


def test_an_app_that_does_not_start_is_said() -> None:
    before = event_loops()
    with pytest.raises(RuntimeError, match="no disk"):
        InProcessTransport(App(broken_start=True))
    assert event_loops() <= before


def event_loops() -> set[threading.Thread]:
    """Return the threads of transports; other tests' may be among them."""
    return {thread for thread in threading.enumerate() if thread.name == "gradbox-inprocess"}
