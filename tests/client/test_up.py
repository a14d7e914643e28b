"""`gradbox up`: what it refuses, what it keeps running, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gradbox import GradClient, Gradient
from gradbox.cli import main
from gradbox.cli.down import holder_of
from gradbox_service.up.processes import LONGEST_LOG_BYTES
from tests.boxes import Up

ZOO = Path(__file__).with_name("zoo.py")
WITHIN_S = 120.0

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
    umask = os.umask(0o022)
    started: list[Up] = []

    def start_up(*arguments: str) -> Up:
        given = ("--port", "0", "--models", str(models), "--device", "cpu", *arguments)
        started.append(Up(data, *given, cwd=tmp_path))
        return started[-1]

    yield start_up
    os.umask(umask)
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


def test_a_box_outlives_its_service_and_refuses_a_second_one(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    data = tmp_path / "data"
    up = start()
    up.wait_ready()
    credentials = data / "client.toml"
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    assert stat.S_IMODE(credentials.stat().st_mode) == 0o600
    run_one_job(data)
    assert not [path for path in data.rglob("*") if path.lstat().st_mode & 0o077]

    code, said = start().finish()
    assert code == 2
    assert f"process {up.process.pid}" in said
    assert str(data) in said

    # Of the other parts, tests/client/test_one_trip.py tells.
    (killed,) = parts_of(data, "-m gradbox_service ")
    os.kill(killed, signal.SIGKILL)
    assert eventually(lambda: parts_of(data, "-m gradbox_service ") not in ([], [killed]))
    run_one_job(data)

    _, said = up.stop(signal.SIGKILL)
    assert "starting it again" in said
    assert eventually(lambda: not parts_of(data)), "kill -9 left processes behind"


def test_a_command_runs_while_the_box_is_up(start: Callable[..., Up], tmp_path: Path) -> None:
    listing = f"umask && {sys.executable} -m gradbox jobs list --json && exit 7"
    code, said = start("--exec", listing, "--public-url", "https://box.lab").finish()
    assert code == 7, said
    assert "\n0022\n[]\n" in said
    assert "gradbox login --url https://box.lab" in said
    assert not (tmp_path / "data" / "client.toml").exists()
    assert not parts_of(tmp_path / "data")


def test_a_box_in_the_background_keeps_short_logs_until_it_is_drained_or_taken_down(
    start: Callable[..., Up], models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    monkeypatch.setenv("GRADBOX_DATA", str(data))
    monkeypatch.setenv("GRADBOX_REDIS_URL", "redis://127.0.0.1:1")
    monkeypatch.delenv("GRADBOX_URL", raising=False)
    with models.open("a") as file:
        file.write('[models.lost]\nbuilder = "python"\nsource = "nowhere.py:make"\n')
    logs = [data / "logs" / "up.log", data / "redis" / "redis.log"]
    for log in logs:
        log.parent.mkdir(parents=True)
        log.write_bytes(b"x" * (LONGEST_LOG_BYTES + 1))
    code, said = start("--wait").finish()
    assert code == 0, said
    assert "the model 'lost' cannot be used" in said
    assert eventually(lambda: all(log.stat().st_size < 10**6 for log in logs))
    assert all(log.with_suffix(".log.1").stat().st_size == LONGEST_LOG_BYTES for log in logs)
    notes = [line for line in logs[0].read_text().splitlines() if "gradbox up: " in line]
    assert notes
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d gradbox up: ", line) for line in notes)
    assert "GRADBOX_REDIS_URL is not used" in said
    assert f"gradbox down --data {data}" in said
    assert holder_of(data) is not None
    credentials = data / "client.toml"
    token = tomllib.loads(credentials.read_text())["token"]
    assert main(["pause", "--reason", "new driver"]) == 0
    with GradClient() as client:
        slow = Gradient(
            model="slow", inputs=[torch.ones(1, 3)] * 20, loss=lambda z: z.sum(), name="held"
        )
        job = client.submit(slow)
        assert str(job.view.hold).endswith("new driver")
        assert main(["resume"]) == 0
        assert eventually(lambda: job.state == "running")
        assert main(["drain"]) == 0
    assert eventually(lambda: holder_of(data) is None)
    assert not parts_of(data)

    again = start()
    again.wait_ready()
    assert tomllib.loads(credentials.read_text())["token"] == token
    with GradClient() as client:
        assert client.job(job.id).state == "done"
        run_one_job(data)
    assert main(["down"]) == 0
    code, said = again.finish()
    assert code == 0, said
    assert not credentials.exists()
    assert not parts_of(data)
    assert main(["down"]) == 3


def test_a_box_that_does_not_get_ready_says_what_it_waits_for_and_how_it_ended(
    start: Callable[..., Up], models: Path, tmp_path: Path
) -> None:
    (tmp_path / "lasts.py").write_text("import time\ntime.sleep(300)\n")
    models.write_text('[models.m]\nbuilder = "python"\nsource = "lasts.py:make"\n')
    up = start("--wait")
    while not re.search(r"not ready yet, after \d+ s: no worker is ready", "".join(up.said)):
        up.said.append(next(up._output))
    box = holder_of(tmp_path / "data")
    assert box is not None
    os.kill(box, signal.SIGKILL)
    code, said = up.finish()
    assert code == 1
    assert "the box was ended by SIGKILL before it was ready" in said
    assert "data/logs/up.log" in said


def test_without_the_workers_packages_it_says_what_to_install(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"from gradbox.cli import main; sys.exit(main(['up', '--data', {data!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 2
    assert "torch is not installed: pip install 'gradbox[worker]'" in done.stderr
    assert not (tmp_path / "data").exists()


def test_a_signal_before_the_box_is_ready_stops_what_was_started(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    up = start()
    assert eventually(lambda: bool(parts_of(tmp_path / "data", "-m gradbox_worker ")))
    code, said = up.stop(signal.SIGINT)
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
    models: Path, tmp_path: Path, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--port", "0", "--models", str(models), "--data", str(tmp_path / "data"), *arguments)
    assert main(["up", *given]) == 2
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ("up", "--device", "cpu"),
        ("up", "--device", "cpu", "--wait"),
        ("service", "--redis-url", "redis://127.0.0.1:1"),
        ("worker", "--redis-url", "redis://127.0.0.1:1", "--device", "cpu"),
    ],
    ids=["up", "up --wait", "service", "worker"],
)
def test_a_data_folder_that_cannot_be_made_is_exit_code_2(
    command: tuple[str, ...], models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    data = tmp_path / "file" / "data"
    given = [*command, "--data", str(data)]
    given += ["--models", str(models)] if command[0] != "service" else []
    given += ["--port", "0"] if command[0] != "worker" else []
    assert main(given) == 2
    said = capsys.readouterr().err
    assert f"expected a data folder that can be written, got {data}: Not a directory" in said
