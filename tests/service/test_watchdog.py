"""Which part of a box hangs, told from one that is busy, starting, or kept from saying so."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import redis

from gradbox_service.fleet import Fleet, WorkerPresence
from gradbox_service.up import watchdog as module
from gradbox_service.up.embedded_redis import EmbeddedRedis
from gradbox_service.up.watchdog import REDIS, SERVICE, Watchdog


class Livez(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Livez)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def watchdog(
    url: str,
    redis_server: EmbeddedRedis,
    connection: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Watchdog]:
    """A watchdog in a hurry."""
    for name, seconds in (("LOOK_S", 0.05), ("ANSWER_S", 1.0), ("START_S", 0.0)):
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(module, "SILENCE_S", 1.0)
    monkeypatch.setattr(module, "WORKER_SILENCE_S", 1.0)
    with Watchdog(url, redis_url=redis_server.url, workers=["w"]) as found:
        yield found


def eventually(holds: Callable[[], bool]) -> bool:
    give_up = time.monotonic() + 60.0
    while not holds():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def announce(connection: redis.Redis, *, ttl_s: float) -> None:
    presence = WorkerPresence(name="w", device="cpu", state="busy")
    Fleet(connection).announce(presence, ttl_s=ttl_s)


def test_parts_that_answer_do_not_hang(watchdog: Watchdog, connection: redis.Redis) -> None:
    announce(connection, ttl_s=60.0)
    begun = time.monotonic()
    time.sleep(1.5)
    for name in (SERVICE, REDIS, "w"):
        assert eventually(lambda name=name: watchdog.heard_s(name) > begun)
        assert not watchdog.hangs(name, started_s=begun)


@pytest.mark.parametrize("status", [500, 503])
def test_a_service_without_a_thread_hangs(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(Livez, "status", status)
    begun = time.monotonic()
    assert eventually(lambda: watchdog.hangs(SERVICE, started_s=begun))
    assert not watchdog.hangs(SERVICE, started_s=time.monotonic())
    assert not watchdog.hangs(REDIS, started_s=begun)


def test_a_worker_that_says_nothing_hangs(watchdog: Watchdog, connection: redis.Redis) -> None:
    announce(connection, ttl_s=0.1)
    begun = time.monotonic()
    assert eventually(lambda: watchdog.hangs("w", started_s=begun))


def test_a_worker_that_announces_itself_after_a_freeze_of_all_does_not_hang(
    watchdog: Watchdog, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WORKER_SILENCE_S", 0.0)
    begun = time.monotonic()
    announce(connection, ttl_s=60)
    assert eventually(lambda: watchdog.heard_s("w") > begun)
    # As a thread that asks finds it after the freeze: the time is over, one question unanswered.
    monkeypatch.setattr(module, "NUM_UNANSWERED", 10**6)
    connection.delete("gradbox:worker:w")
    time.sleep(0.2)
    assert not watchdog.hangs("w", started_s=begun)
    monkeypatch.setattr(module, "NUM_UNANSWERED", 2)
    assert eventually(lambda: watchdog.hangs("w", started_s=begun))


def test_a_worker_that_redis_keeps_silent_does_not_hang(
    watchdog: Watchdog, connection: redis.Redis
) -> None:
    connection.config_set("maxmemory", 1)
    try:
        begun = time.monotonic()
        time.sleep(1.5)
        assert not watchdog.hangs("w", started_s=begun)
        assert not watchdog.hangs(REDIS, started_s=begun)
    finally:
        connection.config_set("maxmemory", 0)


def test_a_frozen_redis_hangs_and_its_workers_do_not(
    watchdog: Watchdog, redis_server: EmbeddedRedis
) -> None:
    redis_server.part.signal(signal.SIGSTOP)
    try:
        begun = time.monotonic()
        assert eventually(lambda: watchdog.hangs(REDIS, started_s=begun))
        assert not watchdog.hangs("w", started_s=begun)
    finally:
        redis_server.part.signal(signal.SIGCONT)
