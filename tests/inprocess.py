"""An httpx transport into an ASGI app of this very process: no port, no socket.

It streams both ways, so uploads, downloads and server-sent events behave as over a network. The app
runs, lifespan included, in an event loop of its own thread; `close` ends it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Scope

# Chunks of a response that may wait for a slow reader.
MAX_WAITING_CHUNKS = 8


class InProcessTransport(httpx.BaseTransport):
    """Hands requests to `app`; pass it to `httpx.Client` or `GradClient` as `transport`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="gradbox-inprocess", daemon=True
        )
        self._thread.start()
        self._lifespan = _Lifespan(app)
        try:
            self._call(self._lifespan.start())
        except BaseException:
            self._stop_loop()
            raise

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; returns once the response has begun."""
        exchange = _Exchange(self._loop, request)
        task = asyncio.run_coroutine_threadsafe(exchange.run(self._app), self._loop)
        task.add_done_callback(exchange.ended)
        status, headers = exchange.begun.result()
        silence_s = request.extensions.get("timeout", {}).get("read")
        return httpx.Response(
            status, headers=headers, stream=_Body(exchange, task, silence_s), request=request
        )

    def close(self) -> None:
        """End the app. May be called twice."""
        if self._loop.is_closed():
            return
        self._call(self._lifespan.stop())
        self._stop_loop()

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self.close()

    def _call(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _stop_loop(self) -> None:
        self._call(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Lifespan:
    """Runs the app's lifespan protocol."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._requests: asyncio.Queue[Message] = asyncio.Queue()
        self._answers: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        scope: Scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        self._task = asyncio.create_task(self._run(scope))
        await self._ask("lifespan.startup")

    async def stop(self) -> None:
        await self._ask("lifespan.shutdown")
        if self._task is not None:
            await self._task

    async def _run(self, scope: Scope) -> None:
        await self._app(scope, self._requests.get, self._answers.put)

    async def _ask(self, kind: str) -> None:
        await self._requests.put({"type": kind})
        answer = await self._answers.get()
        if answer["type"] != f"{kind}.complete":
            raise RuntimeError(f"the app's {kind} failed: {answer.get('message', '')}")


class _Exchange:
    """One request and its response, between the caller's thread and the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, request: httpx.Request) -> None:
        self._loop = loop
        self._request = request
        self._chunks: Iterator[bytes] = iter(request.stream)  # type: ignore[arg-type]
        self._has_body = request.method != "HEAD"  # as a server
        self._body_ended = False
        self._closed = asyncio.Event()
        self._room = asyncio.Semaphore(MAX_WAITING_CHUNKS)
        self._status = 0
        self.begun: Future[tuple[int, list[tuple[bytes, bytes]]]] = Future()
        self.received: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    async def run(self, app: ASGIApp) -> None:
        await app(self._scope(), self._receive, self._send)

    def ended(self, task: Future[None]) -> None:
        """Tell the caller that the app is through with the request, or why it failed."""
        if not self.begun.done():
            silence = httpx.RemoteProtocolError("the app sent no response")
            self.begun.set_exception(task.exception() or silence)
        self.received.put(None)

    def taken(self) -> None:
        """Make room for another chunk; called in the reader's thread."""
        self._loop.call_soon_threadsafe(self._room.release)

    def close(self) -> None:
        """Tell the app that the reader has gone; called in the reader's thread."""
        self._loop.call_soon_threadsafe(self._closed.set)
        self._loop.call_soon_threadsafe(self._room.release)

    async def _receive(self) -> Message:
        if not self._body_ended:
            chunk = await asyncio.to_thread(next, self._chunks, None)
            self._body_ended = chunk is None
            return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}
        await self._closed.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self.begun.set_result((self._status, list(message.get("headers", []))))
        elif message["type"] == "http.response.body" and message.get("body") and self._has_body:
            await self._room.acquire()
            if self._closed.is_set():
                raise OSError("the reader has gone")
            self.received.put(bytes(message["body"]))

    def _scope(self) -> Scope:
        url = self._request.url
        return {
            "type": "http",
            # Of 2.3, as uvicorn's: apps learn from `receive` that the reader has gone.
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self._request.method,
            "headers": [(name.lower(), value) for name, value in self._request.headers.raw],
            "scheme": url.scheme,
            "path": url.path,
            "raw_path": url.raw_path.partition(b"?")[0],
            "query_string": url.query,
            "root_path": "",
            "server": (url.host, url.port),
            "client": ("in-process", 0),
            "state": {},
            "extensions": {},
        }


class _Body(httpx.SyncByteStream):
    """The response's body as it comes; `silence_s` is the request's read timeout."""

    def __init__(self, exchange: _Exchange, task: Future[None], silence_s: float | None) -> None:
        self._exchange = exchange
        self._task = task
        self._silence_s = silence_s

    def __iter__(self) -> Iterator[bytes]:
        while (chunk := self._next()) is not None:
            self._exchange.taken()
            yield chunk

    def _next(self) -> bytes | None:
        try:
            return self._exchange.received.get(timeout=self._silence_s)
        except queue.Empty:
            raise httpx.ReadTimeout(f"nothing came for {self._silence_s} s") from None

    def close(self) -> None:
        self._exchange.close()
        wait([self._task])
