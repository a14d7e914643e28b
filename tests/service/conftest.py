"""Every test of the service runs on Redis, on the in-memory twin, or on both."""

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


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis.start(tmp_path_factory.mktemp("redis"), appendfsync="no")
    yield server
    server.stop()


@pytest.fixture
def connection(redis_server: EmbeddedRedis) -> Iterator[redis.Redis]:
    """An empty Redis."""
    found = connect(redis_server.url)
    found.flushall()
    yield found
    found.close()


@pytest.fixture
def redis_settings(
    redis_server: EmbeddedRedis, connection: redis.Redis, tmp_path: Path
) -> Settings:
    return Settings(redis_url=redis_server.url, data=tmp_path / "data")


@pytest.fixture(params=["memory", "redis"])
def backing(request: pytest.FixtureRequest, tmp_path: Path) -> Backing:
    """The backing of a box, on both stores of records."""
    if request.param == "memory":
        return Backing.in_memory(tmp_path / "data")
    return Backing.on_redis(request.getfixturevalue("redis_settings"))


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
    """A service on either store, with one worker announced that takes no turns."""
    yield from serve(backing, Settings(data=tmp_path / "data"))


@pytest.fixture
def memory_box(tmp_path: Path) -> Iterator[Box]:
    """A service in memory, where the store makes no difference. Its limits are small."""
    settings = Settings(data=tmp_path / "data", max_blob_bytes=100_000, max_spec_bytes=50_000)
    yield from serve(Backing.in_memory(tmp_path / "data"), settings)
