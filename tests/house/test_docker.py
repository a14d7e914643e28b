"""The container files, as far as they can be checked without an engine."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradbox.cli.exits import run_alone
from gradbox_service.http.listening import check_exposure, is_loopback
from gradbox_service.settings import Settings, takes_settings

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_every_port_is_published_on_loopback() -> None:
    published = [p for part in COMPOSE["services"].values() for p in part.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_redis_keeps_what_was_accepted() -> None:
    redis = COMPOSE["services"]["redis"]
    command = " ".join(redis["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert "redis:/data" in redis["volumes"]


def test_every_part_has_a_health_check() -> None:
    for name, part in COMPOSE["services"].items():
        if "build" in part:
            target = part["build"]["target"]
            stage = DOCKERFILE.split(f" AS {target}\n")[1].split("\nFROM ")[0]
            assert "HEALTHCHECK" in stage, name
        else:
            assert "healthcheck" in part, name


def test_the_worker_reserves_a_gpu() -> None:
    devices = COMPOSE["services"]["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]


def test_volumes_are_named_and_shared_by_service_and_worker() -> None:
    for name in ("service", "worker"):
        assert "data:/data" in COMPOSE["services"][name]["volumes"]
    assert set(COMPOSE["volumes"]) == {"redis", "data"}


def test_what_the_images_copy_exists() -> None:
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source


def test_the_service_image_installs_no_torch() -> None:
    stage = DOCKERFILE.split(" AS service\n")[1].split("\nFROM ")[0]
    (extras,) = re.findall(r"pip install .*'\.\[(.+?)\]'", stage)
    assert extras == "service"


def test_the_service_image_may_listen_as_it_is_told_to() -> None:
    """Beyond loopback the service starts with TLS or with a word that none is needed."""
    stage = DOCKERFILE.split(" AS service\n")[1].split("\nFROM ")[0]
    (line,) = re.findall(r"^CMD (\[.+\])$", stage, re.MULTILINE)
    _, _, *options = yaml.safe_load(line)
    found: list[Settings] = []

    @takes_settings()
    def command(given: dict[str, Any]) -> int:
        found.append(Settings.read(**given))
        return 0

    assert run_alone(lambda app: app.command("service")(command), ["service", *options]) == 0
    assert not is_loopback(found[0].host)
    assert check_exposure(found[0]) is not None


@pytest.mark.parametrize("line", re.findall(r'^CMD (\["gradbox".+\])$', DOCKERFILE, re.MULTILINE))
def test_the_command_line_of_an_image_is_understood(line: str) -> None:
    _, command, *options = yaml.safe_load(line)
    flags = [option for option in options if option.startswith("--")]
    done = subprocess.run(
        [sys.executable, "-m", "gradbox", command, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert all(flag in done.stdout for flag in flags), shlex.join(options)
