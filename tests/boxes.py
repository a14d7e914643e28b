"""Whole boxes to run scenarios against: one inside this process, and one by `gradbox up`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import IO, Any

import httpx
from safetensors.torch import load_file
from torch import Tensor

from gradbox import GradClient, GradResult
from gradbox.cli import main
from gradbox.computations import Computation
from gradbox_service.backing import Backing
from gradbox_service.http.app import create_app
from gradbox_service.settings import Settings
from gradbox_service.up.embedded_redis import EmbeddedRedis
from tests.device import DEVICE
from tests.inprocess import InProcessTransport
from tests.inthread import InThreadWorker

ROOT = Path(__file__).resolve().parents[1]
READY = "gradbox ready at "
STOP_TIMEOUT_S = 120
WAIT_S = 120.0


@dataclass(frozen=True)
class TestBox:
    """A box that runs. `transport` is None for one that is reached over the network.

    `owner_token` is that of its owner, where it is known.
    """

    __test__ = False

    url: str
    token: str
    other_token: str
    transport: httpx.BaseTransport | None = None
    data: Path | None = None
    owner_token: str = ""

    def client(self, token: str | None = None, **given: Any) -> GradClient:
        """Return a client of this box."""
        return GradClient(self.url, token or self.token, transport=self.transport, **given)

    def result_of(self, computation: Computation) -> GradResult:
        """Run a job of `token`'s owner, and return its result."""
        with self.client() as client:
            return client.submit(computation).result(WAIT_S)

    def http(self, token: str | None = None) -> httpx.Client:
        """Return plain HTTP to this box, as a program in another language has it."""
        headers = {"Authorization": f"Bearer {token or self.token}"}
        return httpx.Client(base_url=self.url, transport=self.transport, headers=headers)


@contextmanager
def twin_box(data: Path, *, models: Path, **given: Any) -> Iterator[TestBox]:
    """Run service and worker in threads of this process.

    Args:
        given: more settings of the service.
    """
    redis = EmbeddedRedis.start(data / "redis", appendfsync="no")
    settings = Settings(data=data, redis_url=redis.url, **given)
    backing = Backing.on_redis(settings)
    worker = InThreadWorker(
        models,
        records=backing.records,
        turns=backing.turns,
        fleet=backing.fleet,
        blobs=backing.blobs,
        results=backing.results,
        device=str(DEVICE),
    )
    with ExitStack() as stack:
        stack.callback(redis.stop)
        stack.enter_context(worker)
        transport = InProcessTransport(create_app(settings, backing=backing))
        stack.callback(transport.close)
        yield TestBox(
            url="http://twin",
            token=backing.tokens.create("ada"),
            other_token=backing.tokens.create("grace"),
            transport=KeptOpen(transport),
            owner_token=backing.tokens.create("owner", admin=True),
        )


class KeptOpen(httpx.BaseTransport):
    """Lets many clients, each closed by its test, share one in-process app."""

    def __init__(self, transport: httpx.BaseTransport) -> None:
        self._transport = transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._transport.handle_request(request)


class Up:
    """A `gradbox up` process."""

    def __init__(self, data: Path, *arguments: str, cwd: Path = ROOT) -> None:
        self.data = data
        command = [sys.executable, "-m", "gradbox", "up", "--data", str(data), *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.said: list[str] = []

    def wait_ready(self) -> str:
        """Return the URL once jobs can run."""
        for line in self._output:
            self.said.append(line)
            if line.startswith(READY):
                return line.removeprefix(READY).strip()
        raise AssertionError(f"up ended with {self.process.wait()}: {''.join(self.said)}")

    def finish(self) -> tuple[int, str]:
        """Return the exit code and all that was said, once it ends."""
        self.said.extend(self._output)
        return self.process.wait(STOP_TIMEOUT_S), "".join(self.said)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Tell it to stop, and return as `finish` does."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.finish()

    @property
    def _output(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a result file, without the checksums, which its receipt changes."""
    tensors = load_file(path)
    del tensors["checksums"]
    return tensors


def new_token(data: Path, owner: str) -> str:
    """Make a token on a box that runs, by the command but in this process."""
    with redirect_stdout(StringIO()) as said:
        code = main(["tokens", "create", owner, "--data", str(data)])
    assert code == 0, said.getvalue()
    return said.getvalue().strip()


@contextmanager
def running_box(
    data: Path, *, models: Path, arguments: Sequence[str] = ("--device", str(DEVICE))
) -> Iterator[TestBox]:
    """Run `gradbox up` on a free port, and stop it."""
    up = Up(data, "--port", "0", "--models", str(models), *arguments)
    try:
        url = up.wait_ready()
        credentials = tomllib.loads((data / "client.toml").read_text())
        yield TestBox(
            url=url,
            token=credentials["token"],
            other_token=new_token(data, "grace"),
            data=data,
        )
    finally:
        up.stop()
        up._output.close()
