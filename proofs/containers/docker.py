"""The containers by `docker compose`, or `podman compose`."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from proofs.containers.compose import ROOT


class Docker:
    """What docker-compose.yml describes; without a GPU, with deploy/compose.cpu.yml."""

    def __init__(self, engine: str) -> None:
        files = [ROOT / "docker-compose.yml"]
        if not Path("/dev/nvidiactl").exists():
            files.append(ROOT / "deploy" / "compose.cpu.yml")
        self._compose = [engine, "compose", "--project-name", "gradbox-test"]
        self._compose += [word for file in files for word in ("--file", str(file))]

    def build(self) -> None:
        """Build both targets of the Dockerfile."""
        self._run("build")

    def start(self) -> None:
        """Start every service, and return when their health checks pass."""
        self._run("up", "--detach", "--wait")

    def execute(self, name: str, command: Sequence[str]) -> str:
        """Run `command` in the container of service `name`; return what it printed."""
        return self._run("exec", "-T", name, *command, capture=True)

    def logs(self) -> str:
        """Return the end of every container's log."""
        return self._run("logs", "--tail", "50", capture=True)

    def stop(self) -> None:
        """Stop the containers, and delete their volumes."""
        self._run("down", "--volumes")

    def _run(self, *words: str, capture: bool = False) -> str:
        done = subprocess.run(
            [*self._compose, *words], check=True, text=True, cwd=ROOT,
            stdout=subprocess.PIPE if capture else None,
        )  # fmt: skip
        return done.stdout or ""
