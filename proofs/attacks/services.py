"""A real service process, sockets to attack it with, and an eye on whether it still answers."""

from __future__ import annotations

import http.client
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx

from gradbox_service.backing import Backing
from gradbox_service.settings import Settings
from tests.service.boxes import announce

LIVE_WITHIN_S = 0.1
# No load of the machine keeps an answer back so long: the service waits for something.
STALLED_S = 5.0

Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Service:
    """A service that runs, and what it stands on."""

    process: subprocess.Popen[str]
    url: str
    backing: Backing

    def token_of(self, name: str, *, admin: bool = False) -> str:
        return self.backing.tokens.create(name, admin=admin)

    def client_of(self, name: str, *, admin: bool = False) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.token_of(name, admin=admin)}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=300.0, trust_env=False)

    def connect(self) -> socket.socket:
        host, port = self.url.rpartition("/")[2].split(":")
        return socket.create_connection((host, int(port)), timeout=30.0)

    def computed_s(self) -> float:
        """Return the processor time that all threads of the process have had."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_bytes(self) -> int:
        """Return the largest resident size that the process has had."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmHWM in /proc")


@contextmanager
def running(settings: Settings, *arguments: str) -> Iterator[Service]:
    """Run `python -m gradbox_service` on a free port of this machine, with a worker announced."""
    where = ["--redis-url", str(settings.redis_url), "--data", str(settings.data)]
    process = subprocess.Popen(
        [sys.executable, "-m", "gradbox_service", "--port", "0", *where, *arguments],
        env={name: value for name, value in os.environ.items() if not name.startswith("GRADBOX_")},
        stdout=subprocess.PIPE,  # one line; the log goes where pytest's own does, and never blocks
        text=True,
    )
    backing = Backing.on_redis(settings)
    announce(backing)
    try:
        assert process.stdout is not None
        yield Service(process, process.stdout.readline().split()[-1], backing)
    finally:
        process.kill()
        process.communicate()


def while_live(service: Service, attack: Callable[[], Seen]) -> Seen:
    """Return what an attack saw, if /livez went on answering at once while it ran.

    On a busy machine an answer may wait for the processor, which says nothing of the service: what
    counts is how much of that time the service itself computed, and the attack has three tries.
    """
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(attack)
            slowest_s = _slowest_answer_s(service, until=under_way.done)
            seen = under_way.result()
        if slowest_s < LIVE_WITHIN_S:
            return seen
    raise AssertionError(f"/livez took up to {slowest_s:.3f} s")


def _slowest_answer_s(service: Service, *, until: Callable[[], bool]) -> float:
    took = []
    with httpx.Client(base_url=service.url, timeout=300.0, trust_env=False) as client:
        while not until() or len(took) < 5:
            begun, computed = time.monotonic(), service.computed_s()
            assert client.get("/livez").status_code == 200
            seconds = time.monotonic() - begun
            own = min(seconds, service.computed_s() - computed)
            took.append(own if seconds < STALLED_S else seconds)
            time.sleep(0.005)
    return max(took)


def answer_of(connection: socket.socket, *, within_s: float = 60.0) -> bytes:
    """Return all that the service says until it closes the connection or stays silent."""
    said = b""
    while select.select([connection], [], [], within_s)[0]:
        try:
            chunk = connection.recv(65536)
        except ConnectionResetError:
            break
        if not chunk:
            break
        said += chunk
    return said


def unread(service: Service, path: str, token: str, *, num_requests: int = 1) -> socket.socket:
    """Ask for what is at a path, and read nothing of it: the kernel takes little in our place."""
    host, port = service.url.rpartition("/")[2].split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30.0)
    connection.connect((host, int(port)))
    request = f"GET {path} HTTP/1.1\r\nHost: box\r\nAuthorization: Bearer {token}\r\n\r\n"
    connection.sendall(request.encode() * num_requests)
    return connection


def next_status(connection: socket.socket) -> int:
    """Return the status of the next response, read to its end; the connection may go on."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0
