"""A client in several processes: those forked off get the answers to their own requests."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.reduction import ForkingPickler
from threading import Thread

import pytest

from gradbox import GradClient, InvalidInputs
from gradbox.http.connection import Connection
from gradbox.settings import ClientSettings


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


@pytest.mark.parametrize("carry", [ForkingPickler.dumps, copy.deepcopy])
def test_a_client_that_is_pickled_says_to_make_another(carry: Callable[[GradClient], None]) -> None:
    with (
        GradClient("http://127.0.0.1:1", "secret") as client,
        pytest.raises(InvalidInputs, match=r"make another there by GradClient\(\)"),
    ):
        carry(client)
