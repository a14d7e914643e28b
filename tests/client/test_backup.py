"""A copy of a box that runs is one that a box starts from."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gradbox.cli import main
from gradbox_service.database.connection import connect
from gradbox_service.up.embedded_redis import EmbeddedRedis

RECORDS = Path("redis", "appendonlydir")


def test_a_copy_taken_while_redis_writes_its_files_anew_is_whole(tmp_path: Path) -> None:
    data, dest, models = tmp_path / "data", tmp_path / "backups" / "last", tmp_path / "box.toml"
    server = EmbeddedRedis.start(data / "redis")
    (data / "owner-token").write_text("secret\n")
    models.write_text("[models]\n")
    (data / "runs" / "r1").mkdir(parents=True)
    (data / "runs" / "r1" / "save-good.safetensors").write_bytes(b"state")
    (data / "runs" / "r1" / "7.0a.writing").write_bytes(b"half")
    connection, ends = connect(server.url), threading.Event()

    def write() -> None:
        with connect(server.url) as other:
            while not ends.is_set():
                other.incr("count")
                if not other.info("persistence")["aof_rewrite_in_progress"]:
                    other.bgrewriteaof()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(10):
            least = int(connection.incr("count"))  # type: ignore[arg-type]
            given = [str(dest), "--data", str(data), "--models", str(models)]
            assert main(["backup", *given]) == 0
            copied = EmbeddedRedis.start(dest / "redis")
            try:
                assert int(connect(copied.url).get("count") or 0) >= least  # type: ignore[arg-type]
            finally:
                copied.stop()
    finally:
        ends.set()
        writer.join()
        server.stop()
    assert (dest / "owner-token").read_text() == "secret\n"
    assert (dest / "models.toml").read_text() == "[models]\n"
    [state] = (dest / "runs").glob("*/*")
    assert (state.name, state.read_bytes()) == ("save-good.safetensors", b"state")
    assert [path.name for path in dest.parent.iterdir()] == ["last"]


def test_what_is_no_box_and_what_is_no_backup_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, dest = tmp_path / "data", tmp_path / "home"
    dest.mkdir()
    (dest / "thesis").touch()
    assert main(["backup", str(dest), "--data", str(data)]) == 2
    assert f"data folder of a box with --data, got {data}" in capsys.readouterr().err
    (data / RECORDS).mkdir(parents=True)
    (data / RECORDS / "appendonly.aof.manifest").touch()
    assert main(["backup", str(dest), "--data", str(data)]) == 2
    assert "got files" in capsys.readouterr().err
    assert main(["backup", str(dest), "--data", str(data), "--models", "none.toml"]) == 2
    assert "models file at none.toml" in capsys.readouterr().err
    assert os.listdir(dest) == ["thesis"]
    assert main(["backup", str(tmp_path / "copy"), "--data", str(data)]) == 0
    assert f"none is at {data / 'models.toml'}: name it by --models" in capsys.readouterr().out


def test_records_that_are_not_whole_are_no_backup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "data" / RECORDS
    records.mkdir(parents=True)
    manifest = "file appendonly.aof.1.base.rdb seq 1 type b\n"
    (records / "appendonly.aof.manifest").write_text(manifest)
    assert main(["backup", str(tmp_path / "copy"), "--data", str(tmp_path / "data")]) == 2
    assert "appendonly.aof.1.base.rdb" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()
