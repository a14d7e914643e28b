"""docker-compose.yml, read as `docker compose` reads it as far as this project uses it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A volume of the file: a named one, or a folder beside the file."""

    source: str
    target: str
    read_only: bool

    @property
    def is_named(self) -> bool:
        return not self.source.startswith((".", "/"))


@dataclass(frozen=True, kw_only=True)
class Part:
    """One service of the file."""

    name: str
    image: str
    build_target: str | None
    command: list[str] | None
    environment: Mapping[str, str]
    mounts: list[Mount]
    health_check: list[str] | None
    depends_on: set[str]


def parts() -> list[Part]:
    """Return the services of the file, each after those that it depends on."""
    file = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services = _interpolated(file["services"])
    return list(_ordered({name: _part(name, entry) for name, entry in services.items()}))


def _interpolated(value: Any) -> Any:
    """Put in variables of the environment: after parsing, so that an empty one is a string."""
    match value:
        case dict():
            return {key: _interpolated(entry) for key, entry in value.items()}
        case list():
            return [_interpolated(entry) for entry in value]
        case str():
            return _VARIABLE.sub(lambda found: os.environ.get(found[1], found[2]), value)
    return value


def _part(name: str, entry: dict[str, Any]) -> Part:
    return Part(
        name=name,
        image=entry["image"],
        build_target=entry.get("build", {}).get("target"),
        command=entry.get("command"),
        environment=entry.get("environment", {}),
        mounts=[_mount(text) for text in entry.get("volumes", [])],
        health_check=entry.get("healthcheck", {}).get("test", [None])[1:] or None,
        depends_on=set(entry.get("depends_on", {})),
    )


def _mount(text: str) -> Mount:
    source, target, *options = text.split(":")
    return Mount(source=source, target=target, read_only="ro" in options)


def _ordered(described: dict[str, Part]) -> Iterator[Part]:
    placed: set[str] = set()
    while len(placed) < len(described):
        ready = [p for p in described.values() if p.name not in placed and p.depends_on <= placed]
        if not ready:
            raise ValueError(f"services depend on each other in a circle: {sorted(described)}")
        for part in ready:
            placed.add(part.name)
            yield part
