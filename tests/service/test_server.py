"""The service as a process of its own, under uvicorn."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from gradbox.protocol import ResultView
from gradbox_service.backing import Backing
from gradbox_service.settings import MIB, Settings
from tests.service.boxes import announce, run_job, submit

UPLOAD_BYTES = 300 * MIB


@contextmanager
def running(settings: Settings, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `python -m gradbox_service` on a free port, and yield it with its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gradbox_service", "--port", "0", *arguments],
        env=environment(settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.communicate()


def environment(settings: Settings) -> dict[str, str]:
    return os.environ | {
        "GRADBOX_REDIS_URL": str(settings.redis_url),
        "GRADBOX_DATA": str(settings.data),
    }


def client_of(settings: Settings, url: str) -> httpx.Client:
    token = Backing.on_redis(settings).tokens.create("ann")
    return httpx.Client(
        base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=300.0, trust_env=False
    )


def resident_bytes(pid: int) -> int:
    """Return the largest resident size that the process has had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM in /proc")


def holds(pid: int, path: Path) -> bool:
    """Tell whether a process has a file open."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if descriptor.readlink() == path:
                return True
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def large_blob() -> Iterator[bytes]:
    header = f'{{"x":{{"dtype":"U8","shape":[{UPLOAD_BYTES}],"data_offsets":[0,{UPLOAD_BYTES}]}}}}'
    yield len(header).to_bytes(8, "little") + header.encode()
    for _ in range(UPLOAD_BYTES // MIB):
        yield bytes(MIB)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_stays_flat_while_a_large_blob_goes_in_and_out(redis_settings: Settings) -> None:
    digest = hashlib.sha256()
    for chunk in large_blob():
        digest.update(chunk)
    with running(redis_settings) as (process, url):
        backing = Backing.on_redis(redis_settings)
        announce(backing)
        client = client_of(redis_settings, url)
        job_id = submit(client)
        run_job(backing, job_id, data=b"")
        before = resident_bytes(process.pid)
        put = client.put(f"/v1/blobs/{digest.hexdigest()}", content=large_blob())
        assert put.status_code == 201
        path = backing.results.path(job_id, attempt=1)
        os.replace(backing.blobs.path(digest.hexdigest()), path)
        result = ResultView(size_bytes=path.stat().st_size, sha256=digest.hexdigest())
        backing.records.update(job_id, lambda record: replace(record, result=result))
        with client.stream("GET", f"/v1/jobs/{job_id}/result") as answer:
            next(answer.iter_raw())  # the client goes away before the rest
        wait_until(lambda: not holds(process.pid, path))
        assert path.stat().st_mode & stat.S_IWUSR, "taken for fetched"
        with client.stream("GET", f"/v1/jobs/{job_id}/result") as answer:
            received = sum(len(chunk) for chunk in answer.iter_raw())
        assert received > UPLOAD_BYTES
        wait_until(lambda: not path.stat().st_mode & stat.S_IWUSR)
        assert resident_bytes(process.pid) - before < 60 * MIB


def test_a_running_service_loads_no_torch(redis_settings: Settings) -> None:
    code = """
import sys, httpx
from gradbox_service.http.app import create_app
from tests.inprocess import InProcessTransport
from gradbox_service.settings import Settings
with InProcessTransport(create_app(Settings.read())) as transport:
    client = httpx.Client(transport=transport, base_url="http://box")
    assert client.get("/livez").status_code == 200
    assert client.post("/v1/jobs").status_code == 401
    assert client.get("/openapi.json").status_code == 200
print([name for name in sys.modules if name.partition(".")[0] in ("torch", "transformers")])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(redis_settings),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have but one loopback address")
def test_behind_a_proxy_with_tls_the_cookie_is_secure(redis_settings: Settings) -> None:
    with running(redis_settings) as (_, url):
        token = Backing.on_redis(redis_settings).tokens.create("ann")
        a_container = httpx.HTTPTransport(local_address="127.0.0.5")
        with httpx.Client(base_url=url, transport=a_container, trust_env=False) as proxy:
            forwarded = {"Host": "box.example.org", "X-Forwarded-Proto": "https"}
            answer = proxy.post(
                "/v1/session",
                json={"token": token},
                headers=forwarded | {"X-Gradbox-Dashboard": "1"},
            )
    assert answer.headers["set-cookie"].startswith("gradbox-https=")
    assert "Secure" in answer.headers["set-cookie"]


def test_a_port_in_use_is_said_with_exit_code_2(redis_settings: Settings) -> None:
    with running(redis_settings) as (_, url):
        port = url.rpartition(":")[2]
        done = subprocess.run(
            [sys.executable, "-m", "gradbox_service", "--port", port],
            env=environment(redis_settings),
            capture_output=True,
            text=True,
            timeout=500,
        )
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}: another program listens there" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_redis_is_said_with_exit_code_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gradbox_service", "--port", "0", "--data", str(tmp_path)],
        env={name: value for name, value in os.environ.items() if name != "GRADBOX_REDIS_URL"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 2
    assert "--redis-url" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_in_order_though_streams_are_open(
    redis_settings: Settings, number: signal.Signals
) -> None:
    with running(redis_settings) as (process, url):
        announce(Backing.on_redis(redis_settings))
        client = client_of(redis_settings, url)
        job_id = submit(client)
        listening = threading.Event()
        ended: list[str] = []

        def listen() -> None:
            with client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
                for _ in answer.iter_lines():
                    listening.set()
            ended.append("in order")

        listener = threading.Thread(target=listen)
        listener.start()
        assert listening.wait(60.0)
        process.send_signal(number)
        assert process.wait(60.0) == 0
        listener.join()
        assert ended == ["in order"]
        _, log = process.communicate()
        assert "Traceback" not in log


def test_an_upload_that_is_cut_off_leaves_nothing(redis_settings: Settings) -> None:
    with running(redis_settings) as (process, url):
        client = client_of(redis_settings, url)
        host, port = url.removeprefix("http://").split(":")
        head = (
            f"PUT /v1/blobs/{'0' * 64} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100000\r\n"
            f"Authorization: {client.headers['Authorization']}\r\n\r\n"
        )
        incoming = redis_settings.data / "blobs" / "incoming"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + bytes(50_000))
            wait_until(lambda: incoming.exists() and any(incoming.iterdir()))
        wait_until(lambda: not any(incoming.iterdir()))
        process.terminate()
        _, log = process.communicate()
        assert "Traceback" not in log


def test_a_refused_upload_reaches_the_client_as_its_problem(redis_settings: Settings) -> None:
    with running(redis_settings) as (_, url):
        client = httpx.Client(base_url=url, trust_env=False)
        answer = client.put("/v1/blobs/" + "0" * 64, content=bytes(8 * MIB))
        assert answer.status_code == 401
        assert answer.json()["type"].endswith("unauthorized")
