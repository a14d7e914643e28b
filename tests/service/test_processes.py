"""One process of a box: its log stays short, and it is started again soon."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradbox_service.up import processes as part_module
from gradbox_service.up.processes import LONGEST_PAUSE_S, Part, of_module, rotate
from tests.disks import small_disk

MIB = 2**20


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `chatter` that a part can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "chatter.py"


def test_a_part_that_prints_a_gigabyte_leaves_32_mebibytes(tmp_path: Path, module: Path) -> None:
    module.write_text(
        "import os, time\nfor i in range(1024):\n    os.write(1, (b'%06d ' % i) * (2**20 // 7))\n"
        "time.sleep(1)\nos.write(1, b'the end')\n"
    )
    log = tmp_path / "logs" / "chatter.log"
    part = Part("chatter", of_module("chatter"), log=log)
    part.start()
    largest = 0
    while part.running:
        rotate(part.log)
        largest = max(largest, sum(path.stat().st_size for path in log.parent.iterdir()))
        time.sleep(0.1)
    rotate(part.log)
    assert sum(path.stat().st_size for path in log.parent.iterdir()) <= 32 * MIB
    assert largest < 1024 * MIB
    assert part.tail().endswith("the end") or log.with_suffix(".log.1").read_bytes().endswith(
        b"the end"
    )


def test_a_short_log_is_left_alone(tmp_path: Path, module: Path) -> None:
    module.write_text("print('hello')\n")
    part = Part("chatter", of_module("chatter"), log=tmp_path / "chatter.log")
    part.start()
    while part.running:
        time.sleep(0.01)
    rotate(part.log)
    assert part.tail() == "  | hello"
    assert not (tmp_path / "chatter.log.1").exists()


def test_pauses_grow_from_none_to_five_seconds_until_the_part_was_ready(
    tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.write_text("raise SystemExit(1)\n")
    now = 0.0
    # Of this module alone: other threads of this process have the true time.
    monkeypatch.setattr(part_module, "time", SimpleNamespace(monotonic=lambda: now))
    part = Part("chatter", of_module("chatter"), log=tmp_path / "chatter.log")
    pauses = []
    part.start()
    for _ in range(6):
        while part.running:
            time.sleep(0.01)
        assert part.keep_running() is not None
        begun, ended = now, part.pid
        while part.keep_running() is None and part.pid == ended:
            now += 0.25
        pauses.append(now - begun)
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, LONGEST_PAUSE_S]
    part.settle()
    while part.running:
        time.sleep(0.01)
    assert "in 0.0 s" in str(part.keep_running())


def test_a_log_that_fills_the_disk_is_emptied(tmp_path: Path, module: Path) -> None:
    module.write_text("import os\nwhile os.write(1, bytes(2**20)):\n    pass\n")
    with small_disk(tmp_path / "disk", size_bytes=24 * MIB) as disk:
        part = Part("chatter", of_module("chatter"), log=disk / "chatter.log")
        part.start()
        while part.running:
            time.sleep(0.01)
        assert shutil.disk_usage(disk).free == 0
        rotate(part.log)
        assert shutil.disk_usage(disk).free > 0
