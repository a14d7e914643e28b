"""The container files, as far as they can be checked without an engine."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradbox.cli import main
from gradbox.cli.exits import run_alone
from gradbox_service.http.listening import check_exposure, is_loopback
from gradbox_service.settings import Settings, takes_settings
from proofs.containers.compose import parts

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


class _ComposeLoader(yaml.SafeLoader):
    """Reads compose's own tags `!reset` and `!override` as the value behind them."""


for _tag in ("!reset", "!override"):
    _ComposeLoader.add_constructor(
        _tag,
        lambda loader, node: (
            loader.construct_mapping(node, deep=True)
            if isinstance(node, yaml.MappingNode)
            else None
        ),
    )


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


def test_every_image_that_is_built_has_a_tag() -> None:
    for name in ("service", "worker"):
        assert COMPOSE["services"][name]["image"] == f"gradbox-{name}:${{GRADBOX_VERSION:-0.1.0}}"


def test_logs_are_bounded() -> None:
    for name, part in COMPOSE["services"].items():
        assert set(part["logging"]["options"]) == {"max-size", "max-file"}, name


@pytest.mark.parametrize("name", ["compose.cpu.yml", "compose.gpus.yml"])
def test_a_file_laid_over_compose_changes_workers_alone(name: str) -> None:
    over = yaml.load((ROOT / "deploy" / name).read_text(), Loader=_ComposeLoader)
    assert all(part.startswith("worker") for part in over["services"])


def test_every_gpu_of_the_example_has_one_worker() -> None:
    text = (ROOT / "deploy" / "compose.gpus.yml").read_text()
    parts = yaml.load(text, Loader=_ComposeLoader)["services"].values()
    given = [
        part["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for part in parts
    ]
    assert given == [["0"], ["1"]]


def test_volumes_are_named_and_shared_by_service_and_worker() -> None:
    for name in ("service", "worker"):
        assert "data:/data" in COMPOSE["services"][name]["volumes"]
    assert set(COMPOSE["volumes"]) == {"redis", "data"}


def test_what_the_images_copy_exists() -> None:
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source


@pytest.mark.parametrize("target", ["service", "worker"])
def test_an_image_installs_its_part_and_tracing(target: str) -> None:
    stage = DOCKERFILE.split(f" AS {target}\n")[1].split("\nFROM ")[0]
    (extras,) = re.findall(r"pip install .*'\.\[(.+?)\]'", stage)
    assert extras == f"{target},tracing"
    passed = COMPOSE["services"][target]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert passed == "${OTEL_EXPORTER_OTLP_ENDPOINT:-}"


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
def test_the_command_line_of_an_image_is_understood(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, command, *options = yaml.safe_load(line)
    flags = [option for option in options if option.startswith("--")]
    monkeypatch.setenv("COLUMNS", "200")
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert all(flag in said for flag in flags), shlex.join(options)


def test_a_variable_that_is_not_set_reaches_a_container_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    given = {part.name: part.environment for part in parts()}
    assert given["service"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == ""
