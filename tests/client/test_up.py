"""`gradbox up`: what it refuses, what it keeps running, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gradbox import GradClient, Gradient
from tests.boxes import Up

ZOO = Path(__file__).with_name("zoo.py")
WITHIN_S = 30.0

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "models.toml"
    source = json.dumps(f"{ZOO}:slow")
    path.write_text(f'[models.slow]\nbuilder = "python"\nsource = {source}\n')
    return path


@pytest.fixture
def start(tmp_path: Path, models: Path) -> Iterator[Callable[..., Up]]:
    """Starts boxes on tmp_path/data, and kills what a failed test leaves."""
    data = tmp_path / "data"
    started: list[Up] = []

    def start_up(*arguments: str) -> Up:
        given = ("--port", "0", "--models", str(models), "--device", "cpu", *arguments)
        started.append(Up(data, *given, cwd=tmp_path))
        return started[-1]

    yield start_up
    for pid in [*(up.process.pid for up in started if up.process.poll() is None), *parts_of(data)]:
        os.kill(pid, signal.SIGKILL)
    for up in started:
        up.finish()
        up.process.stdout.close()  # type: ignore[union-attr]


def parts_of(data: Path, containing: str = "") -> list[int]:
    """The processes that name a data folder in their command line, apart from `up` itself."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # Redis writes its title over its arguments: the socket's path is in it.
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z" and str(data) in line and " gradbox up " not in line and containing in line:
            found.append(int(folder.name))
    return found


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return False


def run_one_job(data: Path) -> None:
    found = tomllib.loads((data / "client.toml").read_text())
    with GradClient(found["url"], found["token"]) as client:
        gradient = Gradient(model="slow", inputs=[torch.ones(1, 3)], loss=lambda z: z.sum())
        client.submit(gradient).result(WITHIN_S)


def test_a_box_outlives_its_parts_and_refuses_a_second_one(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    data = tmp_path / "data"
    up = start()
    url = up.wait_ready()
    credentials = data / "client.toml"
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    assert stat.S_IMODE(credentials.stat().st_mode) == 0o600
    token = tomllib.loads(credentials.read_text())["token"]
    run_one_job(data)

    code, said = start().finish()
    assert code == 2
    assert f"process {up.process.pid}" in said
    assert str(data) in said

    for module in ("gradbox_service", "gradbox_worker"):
        (killed,) = parts_of(data, f"-m {module} ")
        os.kill(killed, signal.SIGKILL)
        assert eventually(lambda module=module: bool(parts_of(data, f"-m {module} ")))
        run_one_job(data)
    (redis,) = parts_of(data, "unixsocket:")
    os.kill(redis, signal.SIGKILL)
    assert eventually(lambda: parts_of(data, "unixsocket:") not in ([], [redis]))
    run_one_job(data)

    code, said = up.stop(signal.SIGINT)
    assert code == 0, said
    assert "starting it again" in said
    assert eventually(lambda: not parts_of(data))

    again = start()
    assert again.wait_ready() != url
    assert tomllib.loads(credentials.read_text())["token"] == token
    os.kill(again.process.pid, signal.SIGKILL)
    assert eventually(lambda: not parts_of(data)), "kill -9 left processes behind"


def test_a_signal_before_the_box_is_ready_stops_what_was_started(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    up = start()
    assert eventually(lambda: bool(parts_of(tmp_path / "data", "-m gradbox_worker ")))
    code, said = up.stop(signal.SIGTERM)
    assert code == 0, said
    assert not parts_of(tmp_path / "data")


def test_a_port_in_use_is_said_before_anything_starts(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = start("--port", str(taken.getsockname()[1])).finish()
    assert code == 2
    assert "another program listens there" in said
    assert "--port" in said
    assert not parts_of(tmp_path / "data")


def test_a_part_that_fails_is_named_with_its_last_lines(
    start: Callable[..., Up], models: Path, tmp_path: Path
) -> None:
    models.write_text('[models.m]\nbuilder = "python"\nsource = "nowhere.py:make"\n')
    code, said = start().finish()
    assert code == 2
    assert "worker-0-cpu" in said
    assert "nowhere.py" in said
    assert "data/logs" in said
    assert not parts_of(tmp_path / "data")


def test_without_a_models_file_an_example_is_shown(tmp_path: Path) -> None:
    code, said = Up(tmp_path / "data", "--port", "0", cwd=tmp_path).finish()
    assert code == 2
    assert "[models.minilm]" in said
    assert str(tmp_path / "data" / "models.toml") in said
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("arguments", [("--port", "http"), ("--workers", "0"), ("--device", ",")])
def test_arguments_that_mean_nothing_are_refused(
    start: Callable[..., Up], arguments: tuple[str, ...]
) -> None:
    code, said = start(*arguments).finish()
    assert code == 2
    assert "expected" in said
