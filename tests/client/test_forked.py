"""A client in several processes: those forked off get the answers to their own requests."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.reduction import ForkingPickler
from threading import Thread

import httpx
import pytest

from gradbox import AsyncGradClient, GradClient, InvalidInputs, JobState
from gradbox.http.connection import Connection
from gradbox.protocol import JobList
from gradbox.settings import ClientSettings
from tests.client.wires import answer, job_view


class Port(BaseHTTPRequestHandler):
    """Answers with the port that the client's connection comes from, and keeps it open."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        content = str(self.client_address[1]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def connection() -> Iterator[Connection]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Port) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        connection = Connection(ClientSettings(url=url, token="t"))
        yield connection
        connection.close()
        server.shutdown()
        server.server_close()


def port(connection: Connection) -> int:
    return int(connection.request("GET", "/").content)


def test_a_forked_process_has_connections_of_its_own(connection: Connection) -> None:
    ours = port(connection)
    fork = multiprocessing.get_context("fork")
    theirs: multiprocessing.Queue[list[int]] = fork.Queue()
    children = [
        fork.Process(target=lambda: theirs.put([port(connection), port(connection)]))
        for _ in range(2)
    ]
    for child in children:
        child.start()
    (a, also_a), (b, also_b) = theirs.get(timeout=60), theirs.get(timeout=60)
    for child in children:
        child.join()
    assert (a, b) == (also_a, also_b)
    assert len({ours, a, b}) == 3
    assert port(connection) == ours


def test_a_forked_process_awaits_with_threads_of_its_own() -> None:
    parent, fork = os.getpid(), multiprocessing.get_context("fork")
    states: multiprocessing.Queue[str] = fork.Queue()

    def handler(request: httpx.Request) -> httpx.Response:
        view = job_view(JobState.RUNNING if os.getpid() == parent else JobState.DONE)
        if request.url.path == "/v1/jobs":
            return httpx.Response(200, content=JobList(jobs=[view]).model_dump_json())
        return answer(view)

    async def state(client: AsyncGradClient) -> str:
        return (await (await client.job("j1")).wait()).state.value

    async def main() -> None:
        client = AsyncGradClient("http://box", "t", transport=httpx.MockTransport(handler))
        waits = asyncio.ensure_future(state(client))
        await asyncio.sleep(0.2)
        child = fork.Process(target=lambda: states.put(asyncio.run(state(client))))
        child.start()
        assert await asyncio.to_thread(states.get, timeout=60) == "done"
        await asyncio.to_thread(child.join)
        assert not waits.done()
        await client.aclose()
        await asyncio.gather(waits, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("carry", [ForkingPickler.dumps, copy.deepcopy])
def test_a_client_that_is_pickled_says_to_make_another(carry: Callable[[GradClient], None]) -> None:
    with (
        GradClient("http://127.0.0.1:1", "secret") as client,
        pytest.raises(InvalidInputs, match=r"make another there by GradClient\(\)"),
    ):
        carry(client)
