"""The box that the faults happen to: `gradbox up`, started again on its port when killed."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from proofs.chaos.models import SOURCES, write_models
from proofs.chaos.processes import MARK, Process, processes_of, wait_until_gone
from tests.boxes import READY, ROOT, new_token

READY_WITHIN_S = 120.0
STOP_WITHIN_S = 60.0
LOOK_S = 0.02


class Box:
    """One box on CPU in a folder.

    Attributes:
        data: its data folder.
        port: where it listens, the same after every restart.
        tokens: by owner, made once the box runs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_workers: int,
        models: Mapping[str, str] = SOURCES,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the box; `start` starts it.

        Args:
            models: by name, what builds each.
            arguments: more of `gradbox up`.
            environment: more of its environment.
        """
        self.data = folder / "data"
        self.num_workers = num_workers
        self.port = _free_port()
        self.tokens: dict[str, str] = {}
        self._mark = secrets.token_hex(8)
        self._models = write_models(folder / "models.toml", models)
        self._arguments = list(arguments)
        self._environment = dict(environment or {})
        self._log = folder / "up.log"
        self._up: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> float:
        """Start `gradbox up` and wait until jobs can run; return the seconds that took."""
        begin = time.monotonic()
        arguments = ["--data", str(self.data), "--models", str(self._models), "--device", "cpu"]
        arguments += ["--port", str(self.port), "--workers", str(self.num_workers)]
        with self._log.open("ab") as log:
            said = log.tell()
            self._up = subprocess.Popen(
                [sys.executable, "-m", "gradbox", "up", *arguments, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    **self._environment,
                    MARK: self._mark,
                },
                start_new_session=True,
            )
        while READY.encode() not in self._log.read_bytes()[said:]:
            code = self._up.poll()
            assert code is None, f"gradbox up ended with {code}: {self.said()}"
            late = time.monotonic() - begin > READY_WITHIN_S
            assert not late, f"gradbox up is not ready: {self.said()}"
            time.sleep(LOOK_S)
        return time.monotonic() - begin

    def said(self) -> str:
        """Return the last lines of what `gradbox up` printed."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])

    def processes(self, *roles: str) -> list[Process]:
        """Return the living processes, of some roles or all."""
        found = processes_of(self._mark, self.data)
        return [process for process in found if not roles or process.role in roles]

    def kill(self, processes: Sequence[Process]) -> None:
        """Kill processes at once; of a box that is killed with its supervisor nothing may stay."""
        for process in processes:
            process.signal(signal.SIGKILL)
        if self._up is not None and any(process.role == "up" for process in processes):
            self._up.wait(STOP_WITHIN_S)

    def stop(self) -> list[Process]:
        """Stop the box in order, and return what it left running."""
        if self._up is not None and self._up.poll() is None:
            self._up.send_signal(signal.SIGTERM)
            self._up.wait(STOP_WITHIN_S)
        return self.left_over()

    def left_over(self) -> list[Process]:
        """Return the processes that outlive a box that has ended, killing them."""
        found = self.processes()
        wait_until_gone([process.pid for process in found], within_s=5.0)
        left = self.processes()
        for process in left:
            process.signal(signal.SIGKILL)
        return left

    def make_tokens(self, owners: Sequence[str]) -> None:
        """Make a token for every owner, as the box's owner does."""
        for owner in owners:
            self.tokens[owner] = new_token(self.data, owner)

    def own_token(self) -> str:
        """Return the token that `gradbox up` wrote."""
        return (self.data / "owner-token").read_text().strip()

    def http(self, owner: str, *, timeout_s: float = 60.0) -> httpx.Client:
        """Return plain HTTP to the box with an owner's token, past the proxy."""
        headers = {"Authorization": f"Bearer {self.tokens[owner]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, trust_env=False)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
