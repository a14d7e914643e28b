"""What a Redis says when it will take a command later, and what it says when it never will."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from gradbox_service.database.connection import connect
from gradbox_service.database.refusals import store_refuses, why_refused
from gradbox_service.up.embedded_redis import EmbeddedRedis
from tests.disks import small_disk

MIB = 2**20


def error_of(call: Callable[[], object]) -> redis.RedisError:
    with pytest.raises(redis.RedisError) as raised:
        call()
    return raised.value


def fill(connection: redis.Redis) -> None:
    for number in range(1000):
        connection.set(str(number), "x" * 10_000)


def plain(connection: redis.Redis) -> object:
    return connection.set("key", "value")


def transaction(connection: redis.Redis) -> object:
    with connection.pipeline() as pipe:
        pipe.set("key", "value")
        pipe.set("other", "value")
        return pipe.execute()


def script(connection: redis.Redis) -> object:
    return connection.eval("return redis.call('set', KEYS[1], 'value')", 1, "key")


WRITES = pytest.mark.parametrize("write", [plain, transaction, script])


@WRITES
def test_a_full_disk_is_a_refusal_for_now(
    tmp_path: Path, write: Callable[[redis.Redis], object]
) -> None:
    with small_disk(tmp_path / "disk", size_bytes=2 * MIB) as disk:
        server = EmbeddedRedis.start(disk)
        try:
            connection = connect(server.url)
            with pytest.raises(redis.ResponseError, match="MISCONF"):
                fill(connection)
            refused = error_of(lambda: write(connection))
            assert store_refuses(refused)
            assert "make room there by hand" in why_refused(refused)
        finally:
            server.stop()


@WRITES
def test_reached_memory_is_a_refusal_for_now(
    connection: redis.Redis, write: Callable[[redis.Redis], object]
) -> None:
    connection.config_set("maxmemory", 1)
    try:
        refused = error_of(lambda: write(connection))
        assert store_refuses(refused)
        assert "--redis-memory-bytes" in why_refused(refused)
    finally:
        connection.config_set("maxmemory", 0)


@WRITES
def test_a_replica_refuses_for_now(
    connection: redis.Redis, write: Callable[[redis.Redis], object]
) -> None:
    connection.replicaof("127.0.0.1", "1")
    try:
        refused = error_of(lambda: write(connection))
        assert store_refuses(refused)
        assert "fail-over" in why_refused(refused)
    finally:
        connection.replicaof("NO", "ONE")


def test_silence_is_a_refusal_for_now(tmp_path: Path) -> None:
    nobody = connect(f"unix://{tmp_path}/nobody.sock", retries=0)
    silent = error_of(nobody.ping)
    assert store_refuses(silent)
    assert "does not answer" in why_refused(silent)
    assert store_refuses(redis.TimeoutError("no answer"))


def test_an_exec_refused_as_a_whole_counts_by_its_reason() -> None:
    refused = redis.exceptions.ExecAbortError
    assert store_refuses(refused("Transaction discarded because of: MISCONF Errors writing"))
    assert not store_refuses(refused("Transaction discarded because of previous errors."))


def test_a_mistake_is_not_a_refusal(connection: redis.Redis) -> None:
    connection.set("key", "value")
    assert not store_refuses(error_of(lambda: connection.lpush("key", "x")))
    assert not store_refuses(redis.WatchError("changed"))
    assert not store_refuses(redis.AuthenticationError("invalid password"))
    assert not store_refuses(ValueError("MISCONF"))


def test_what_a_command_carries_does_not_count(connection: redis.Redis) -> None:
    connection.set("key", "value")

    def write() -> object:
        with connection.pipeline() as pipe:
            pipe.lpush("key", "of pipeline caused error: MISCONF")
            return pipe.execute()

    assert not store_refuses(error_of(write))
