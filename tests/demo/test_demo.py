"""The demo, end to end: what it prints, when it fails, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradbox_worker.demo import command

DEMO = [sys.executable, "-m", "gradbox", "demo", "--pairs", "8", "--shard", "4"]


def started(tmp_path: Path) -> subprocess.Popen[str]:
    """Start a small demo whose data folder lies in `tmp_path`."""
    return subprocess.Popen(
        DEMO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        # A suite that runs in the background has Ctrl-C ignored, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def left_in(folder: Path) -> list[str]:
    """Return what lies in `folder`, but for torch's own cache."""
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor")]


def processes_in(folder: Path) -> list[str]:
    """Return the command lines of living processes that name `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


def test_the_demo_agrees_with_naive_code_and_cleans_up(tmp_path: Path) -> None:
    demo = started(tmp_path)
    said, _ = demo.communicate(timeout=500)
    assert demo.returncode == 0, said
    assert "gradients            103" in said
    assert re.search(r"loss +\d+\.\d+ +\(naive \d+\.\d+\)", said)
    assert re.search(r"peak beyond model +\d+ MiB", said)
    assert "%|" not in said  # a pipe gets no progress bar
    assert float(re.findall(r"largest difference +(\S+)", said)[0]) < 1e-4
    assert not left_in(tmp_path)
    assert not processes_in(tmp_path)


@pytest.mark.slow  # tests/client/test_up.py stops a box before it is ready, too
def test_ctrl_c_stops_all_that_the_demo_started(tmp_path: Path) -> None:
    demo = started(tmp_path)
    give_up = time.monotonic() + 500
    # The last of its processes to start; the box takes seconds more until it is ready.
    while not any("gradbox_worker.turns.main" in line for line in processes_in(tmp_path)):
        assert demo.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.05)
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=500)
    assert demo.returncode == 130
    assert not left_in(tmp_path)
    assert not processes_in(tmp_path)


def test_a_difference_beyond_the_tolerance_is_a_failure() -> None:
    found = command.NaiveComparison(
        loss=1.0,
        naive_loss=1.0,
        num_gradients=1,
        difference=2 * command.TOLERANCE,
        worst="layer.weight",
        job_bytes=1,
        naive_bytes=2,
    )
    assert command.report(found) == 1
