"""Tests of the service run on a real Redis, which is emptied for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis

from gradbox_service.backing import Backing
from gradbox_service.database.connection import connect
from gradbox_service.http.app import create_app
from gradbox_service.settings import Settings
from gradbox_service.up.embedded_redis import EmbeddedRedis
from tests.inprocess import InProcessTransport
from tests.service.boxes import announce
from tests.valkey import server


@pytest.fixture(scope="session")
def redis_server() -> EmbeddedRedis:
    return server()


@pytest.fixture
def connection(redis_server: EmbeddedRedis) -> Iterator[redis.Redis]:
    """An empty Redis."""
    found = connect(redis_server.url)
    found.flushdb()
    yield found
    found.close()


@pytest.fixture
def redis_settings(
    redis_server: EmbeddedRedis, connection: redis.Redis, tmp_path: Path
) -> Settings:
    return Settings(redis_url=redis_server.url, data=tmp_path / "data")


@pytest.fixture
def backing(redis_settings: Settings) -> Backing:
    """The backing of a box with no record."""
    return Backing.on_redis(redis_settings)


@dataclass(frozen=True)
class Box:
    """A service in this process, and a client of it."""

    backing: Backing
    client: httpx.Client
    transport: InProcessTransport

    def client_of(self, name: str) -> httpx.Client:
        """Return a client with a fresh token of somebody."""
        return client_with(self.transport, self.backing.tokens.create(name))


def client_with(transport: httpx.BaseTransport, token: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.Client(transport=transport, base_url="http://box", headers=headers)


def serve(backing: Backing, settings: Settings) -> Iterator[Box]:
    announce(backing)
    with InProcessTransport(create_app(settings, backing=backing)) as transport:
        yield Box(backing, client_with(transport, backing.tokens.create("ann")), transport)


@pytest.fixture
def box(backing: Backing, tmp_path: Path) -> Iterator[Box]:
    """A service with one worker announced that takes no turns."""
    yield from serve(backing, Settings(data=tmp_path / "data"))


@pytest.fixture
def small_box(backing: Backing, tmp_path: Path) -> Iterator[Box]:
    """A service whose limits are small."""
    settings = Settings(data=tmp_path / "data", max_blob_bytes=100_000, max_spec_bytes=50_000)
    yield from serve(backing, settings)
