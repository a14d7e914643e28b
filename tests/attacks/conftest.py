"""The attacks run against a service process of their own, over sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gradbox_service.database.connection import connect
from gradbox_service.settings import Settings
from gradbox_service.up.embedded_redis import EmbeddedRedis
from proofs.attacks.services import Service, running


@pytest.fixture(scope="package")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """The Redis and the folder of the attacked services."""
    folder = tmp_path_factory.mktemp("attacked")
    server = EmbeddedRedis.start(folder / "redis", appendfsync="no")
    yield Settings(redis_url=server.url, data=folder / "data")
    server.stop()


@pytest.fixture(scope="module")
def service(settings: Settings) -> Iterator[Service]:
    """A service whose patience is short, so that a test of it is."""
    connect(str(settings.redis_url)).flushall()
    patience = ("--head-timeout-s", "1", "--body-timeout-s", "2")
    with running(settings, *patience) as found:
        yield found


@pytest.fixture
def folder(settings: Settings) -> Path:
    return settings.data
