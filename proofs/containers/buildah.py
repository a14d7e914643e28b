"""The containers without a container engine: buildah in chroot isolation, on a debootstrap image.

For a machine that reaches no image registry and may start no containers. `python:3.12-slim` and
`redis:8-alpine` are stood in for by one Debian with its own Python and Redis, so what the official
images hold is not tested; our Dockerfile, commands, users, volumes and health checks are. All
containers share the network of this process, which `__main__` makes a private one. Needs root,
buildah and debootstrap.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proofs.containers.compose import ROOT, Mount, Part, parts

BASE = "docker.io/library/python:3.12-slim"
PACKAGES = "ca-certificates,python3,python3-venv,python3-pip,redis-server"
DEBIAN = "bookworm"
#: The user of the Dockerfile, to whom /data of the image belongs and so a new volume there.
USER_ID = 10001
HEALTHY_WITHIN_S = 180.0


class Buildah:
    """What docker-compose.yml describes, one `buildah run` for each service."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gradbox-containers-"))
        self._containers: dict[str, str] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._parts = parts()

    def build(self) -> None:
        """Make the base image where it is missing, and build both targets of the Dockerfile.

        `GRADBOX_BUILD_OPTIONS` is given to `buildah bud` as it is: a host whose pip has an index or
        certificates of its own mounts them by it (`--volume /etc/pip.conf:/etc/pip.conf:ro`).
        """
        if not _buildah("images", "--quiet", "--filter", f"reference={BASE}"):
            self._make_base()
        extra = shlex.split(os.environ.get("GRADBOX_BUILD_OPTIONS", ""))
        for part in self._parts:
            if part.build_target is not None:
                command = ["buildah", "bud", "--isolation", "chroot", "--network", "host", *extra]
                # OCI's own format has no place for HEALTHCHECK.
                command += ["--format", "docker"]
                command += ["--target", part.build_target, "--tag", part.image, "."]
                subprocess.run(command, check=True, cwd=ROOT)

    def start(self) -> None:
        """Start every service, after the health checks of those it depends on."""
        for part in self._parts:
            image = part.image if part.build_target is not None else BASE
            hosts = [word for p in self._parts for word in ("--add-host", f"{p.name}:127.0.0.1")]
            container = self._containers[part.name] = _buildah("from", *hosts, image)
            for mount in part.mounts:
                # A VOLUME of the image would lie over what `buildah run` mounts at its place.
                _buildah("config", "--volume", f"{mount.target}-", container)
            command = part.command or self._image_setting(part, "Cmd")
            self._running[part.name] = self._start(part, command)
            self._until_healthy(part)

    def execute(self, name: str, command: Sequence[str]) -> str:
        """Run `command` in the container of service `name`; return what it printed."""
        (part,) = [part for part in self._parts if part.name == name]
        return subprocess.run(
            self._run_words(part, command), check=True, text=True, stdout=subprocess.PIPE
        ).stdout

    def logs(self) -> str:
        """Return the end of every container's log."""
        return "\n".join(
            f"--- {name}\n" + (self._folder / f"{name}.log").read_text(errors="replace")[-4000:]
            for name in self._running
        )

    def stop(self) -> None:
        """Stop the services, the last started first, and remove their containers and volumes."""
        for process in reversed(self._running.values()):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=60)
        if self._containers:
            _buildah("rm", *self._containers.values())
        shutil.rmtree(self._folder, ignore_errors=True)

    def _make_base(self) -> None:
        root = self._folder / "base"
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", DEBIAN, str(root)],
            check=True,
        )
        # The official image's pip installs into the system, and its interpreter is called `python`.
        for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()
        (root / "usr/bin/python").symlink_to("python3")
        container = _buildah("from", "scratch")
        _buildah("add", "--quiet", container, str(root), "/")
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        _buildah("config", "--env", f"PATH={path}", container)
        _buildah("commit", "--quiet", "--rm", container, BASE)
        shutil.rmtree(root)

    def _start(self, part: Part, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{part.name}.log").open("wb") as log:
            return subprocess.Popen(
                self._run_words(part, command),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _run_words(self, part: Part, command: Sequence[str]) -> list[str]:
        words = ["buildah", "run", "--isolation", "chroot", "--network", "host"]
        words += [word for pair in part.environment.items() for word in ("--env", "=".join(pair))]
        for mount in part.mounts:
            options = ":ro" if mount.read_only else ""
            words += ["--volume", f"{self._source(mount)}:{mount.target}{options}"]
        return [*words, self._containers[part.name], "--", *command]

    def _source(self, mount: Mount) -> Path:
        if not mount.is_named:
            return (ROOT / mount.source).resolve()
        folder = self._folder / "volumes" / mount.source
        if not folder.exists():
            folder.mkdir(parents=True)
            os.chown(folder, USER_ID, USER_ID)
        return folder

    def _image_setting(self, part: Part, field: str) -> Any:
        described = json.loads(_buildah("inspect", "--type", "image", part.image))
        return described["Docker"]["config"][field]

    def _until_healthy(self, part: Part) -> None:
        check = part.health_check or self._image_setting(part, "Healthcheck")["Test"][1:]
        deadline = time.monotonic() + HEALTHY_WITHIN_S
        while subprocess.run(self._run_words(part, check), capture_output=True).returncode != 0:
            if time.monotonic() > deadline or self._running[part.name].poll() is not None:
                raise RuntimeError(f"{part.name} never became healthy: {shlex.join(check)}")
            time.sleep(1)


def _buildah(*words: str) -> str:
    return subprocess.run(
        ["buildah", *words], check=True, text=True, stdout=subprocess.PIPE
    ).stdout.strip()
