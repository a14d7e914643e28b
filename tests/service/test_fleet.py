"""What workers announce, on both stores."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis

from gradbox_service.backing import Backing
from gradbox_service.fleet import WorkerPresence
from gradbox_service.fleet.workers import (
    DESCRIBED,
    DESCRIBED_S,
    MODELS,
    may_be_run,
    offered_versions,
)
from gradbox_service.settings import Settings
from tests.service.boxes import MODEL, announce


def test_a_worker_is_known_until_it_retires(backing: Backing) -> None:
    announce(backing, name="b")
    announce(backing, name="a", state="busy")
    assert [worker.name for worker in backing.fleet.workers()] == ["a", "b"]
    backing.fleet.retire("a")
    assert [worker.name for worker in backing.fleet.workers()] == ["b"]


def test_a_silent_worker_is_forgotten(backing: Backing) -> None:
    presence = WorkerPresence(name="w", device="cpu", state="idle")
    backing.fleet.announce(presence, ttl_s=60.0)
    assert backing.fleet.workers() == [presence]
    backing.fleet.announce(presence, ttl_s=0.05)
    time.sleep(0.1)
    assert backing.fleet.workers() == []


def test_the_living_are_told_while_redis_takes_no_change(
    redis_settings: Settings, connection: redis.Redis
) -> None:
    fleet = Backing.on_redis(redis_settings).fleet
    for name, ttl_s in (("lives", 60.0), ("gone", 0.001)):
        fleet.announce(WorkerPresence(name=name, device="cpu", state="idle"), ttl_s=ttl_s)
    time.sleep(0.01)
    connection.config_set("min-replicas-to-write", 1)
    try:
        assert [worker.name for worker in fleet.workers()] == ["lives"]
    finally:
        connection.config_set("min-replicas-to-write", 0)


def test_a_described_model_is_found_by_name_and_version(backing: Backing) -> None:
    backing.fleet.describe([MODEL])
    assert backing.fleet.model("tiny", version=MODEL.version) == MODEL
    assert backing.fleet.model("tiny", version="b" * 64) is None


def test_descriptions_of_versions_that_nobody_offers_any_more_go(
    redis_settings: Settings, connection: redis.Redis
) -> None:
    fleet = Backing.on_redis(redis_settings).fleet
    versions = [letter * 64 for letter in "abcd"]
    views = [MODEL.model_copy(update={"version": version}) for version in versions]
    other = MODEL.model_copy(update={"name": "other"})
    fleet.describe([*views[:3], other])
    offers = {MODEL.name: versions[0]}
    fleet.announce(WorkerPresence(name="w", device="cpu", state="idle", models=offers), ttl_s=60.0)
    long_ago = time.time() - DESCRIBED_S - 1.0
    old = [*(f"tiny@{version}" for version in versions[:2]), f"other@{other.version}"]
    connection.zadd(DESCRIBED, dict.fromkeys(old, long_ago))
    fleet.describe(views[3:])
    left = [version for version in versions if fleet.model("tiny", version=version) is not None]
    assert left == [versions[0], *versions[2:]]
    assert fleet.model("other", version=other.version) == other
    assert connection.hlen(MODELS) == connection.zcard(DESCRIBED) == 4


def test_a_model_described_anew_is_found_as_it_is_described_now(backing: Backing) -> None:
    for size_bytes in (1, 2, 1):
        backing.fleet.describe([MODEL.model_copy(update={"size_bytes": size_bytes})])
        for _ in range(2):
            found = backing.fleet.model(MODEL.name, version=MODEL.version)
            assert found is not None
            assert found.size_bytes == size_bytes


def test_the_version_that_most_workers_offer_comes_first() -> None:
    offers = [{"m": "old"}, {"m": "new"}, {"m": "new", "other": "1"}, {}]
    workers = [
        WorkerPresence(name=str(i), device="cpu", state="idle", models=models)
        for i, models in enumerate(offers)
    ]
    assert offered_versions(workers) == {"m": ["new", "old"], "other": ["1"]}


@pytest.mark.parametrize(
    ("state", "models", "may"),
    [
        ("idle", {"m": "new"}, True),
        ("busy", {"m": "new"}, True),
        ("idle", {"m": "old"}, False),
        ("idle", {"other": "new"}, False),
        ("starting", {}, True),
    ],
)
def test_who_may_run_a_version(state: Any, models: dict[str, str], may: bool) -> None:
    worker = WorkerPresence(name="w", device="cpu", state=state, models=models)
    assert may_be_run("m", "new", by=[worker]) is may
    assert not may_be_run("m", "new", by=[])
