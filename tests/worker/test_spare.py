"""The process that waits to take a dead device process's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradbox.protocol import JobState
from tests.worker import zoo
from tests.worker.box import Box, WorkerProcess, running_box, running_worker, shards_of


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with running_box(tmp_path_factory.mktemp("spare")) as box:
        builder = box.folder / "builder.py"
        builder.write_text(
            Path(zoo.__file__).read_text()
            + f"\nwith open({str(imports_of(box))!r}, 'a') as file:\n"
            + "    file.write('imported\\n')\n"
        )
        box.models_file.write_text(f'[models.m]\nbuilder = "python"\nsource = "{builder}:affine"\n')
        yield box


@pytest.fixture(scope="module")
def worker(box: Box) -> Iterator[WorkerProcess]:
    log = box.folder / "logs" / "device.log"
    with running_worker(box, "--spare", "--device-log", str(log)) as worker:
        yield worker


def imports_of(box: Box) -> Path:
    return box.folder / "imports"


def eventually(find: Callable[[], int]) -> int:
    """Return what is found once it can be."""
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        try:
            return find()
        except ValueError:  # none, or two for a moment
            time.sleep(0.01)
    raise AssertionError("there is none after 60 s")


def test_a_spare_takes_the_place_of_a_device_that_was_killed(
    box: Box, worker: WorkerProcess
) -> None:
    device, spare = worker.child_pid, eventually(lambda: worker.spare_pid)
    os.kill(device, signal.SIGKILL)
    version = box.backing.fleet.workers()[0].models["m"]
    assert imports_of(box).read_text() == "imported\n"  # by the first device alone
    job = box.submit(box.spec(shards_of(2)), version=version)
    assert box.wait(job).state is JobState.DONE
    assert worker.child_pid == spare
    assert imports_of(box).read_text() == "imported\n" * 2


def test_a_spare_that_was_killed_is_replaced(worker: WorkerProcess) -> None:
    device, spare = worker.child_pid, eventually(lambda: worker.spare_pid)
    os.kill(spare, signal.SIGKILL)
    give_up = time.monotonic() + 60
    while eventually(lambda: worker.spare_pid) == spare:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    assert worker.child_pid == device


def test_what_a_device_prints_is_in_its_log(box: Box, worker: WorkerProcess) -> None:
    assert "loaded m" in (box.folder / "logs" / "device.log").read_text()
    assert "loaded m" not in worker.log.read_text()


def test_a_worker_that_ends_leaves_no_spare(box: Box, worker: WorkerProcess) -> None:
    spare = eventually(lambda: worker.spare_pid)
    assert worker.stop() == 0
    assert not Path(f"/proc/{spare}").exists()


def test_what_a_spare_imports_starts_no_cuda(box: Box) -> None:
    ask = (
        "import sys, pathlib, torch\n"
        "from gradbox_worker.device.importing import import_ahead\n"
        "import_ahead(pathlib.Path(sys.argv[1]))\n"
        "import gradbox_worker.device.serving\n"
        "sys.exit(torch.cuda.is_initialized())"
    )
    subprocess.run([sys.executable, "-c", ask, str(box.models_file)], check=True)
