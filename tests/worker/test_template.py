"""The process that has imported torch, and that device processes are forked from."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gradbox.protocol import JobState
from gradbox_worker.device import DeviceProcess
from gradbox_worker.work import Finished
from tests.worker import zoo
from tests.worker.box import Box, WorkerProcess, child_called, eventually, shards_of
from tests.worker.devices import Watching, box_in, device_of, kill, work_of

DYING_OF_A_FORK = """\
import os, signal, sys

if "--template" in sys.orig_argv:
    os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGKILL))
"""


def drawn_by_devices(box: Box) -> list[str]:
    """A line for each device process that built "drawing": a number that NumPy drew."""
    return (box.folder / "drawn").read_text().splitlines()


def next_job_is_done(box: Box) -> bool:
    version = box.backing.fleet.workers()[0].models["drawing"]
    job = box.submit(box.spec(shards_of(2), model="drawing"), version=version)
    return box.wait(job).state is JobState.DONE


def test_a_device_that_was_killed_is_replaced_from_the_same_template(
    box: Box, worker: WorkerProcess
) -> None:
    device, template = worker.child_pid, worker.template_pid
    drawn = drawn_by_devices(box)
    os.kill(device, signal.SIGKILL)
    assert next_job_is_done(box)
    assert worker.child_pid not in (device, template)
    assert worker.template_pid == template
    assert drawn_by_devices(box)[:-1] == drawn  # by the new device alone, and once


def test_devices_of_one_template_draw_different_numbers(box: Box, worker: WorkerProcess) -> None:
    for _ in range(2):
        os.kill(worker.child_pid, signal.SIGKILL)
        assert next_job_is_done(box)
        worker.wait_until_ready()
    drawn = drawn_by_devices(box)
    assert len(set(drawn)) == len(drawn) > 1


def test_a_template_that_was_killed_is_replaced_and_its_device_too(
    box: Box, worker: WorkerProcess
) -> None:
    device, template = worker.child_pid, worker.template_pid
    os.kill(template, signal.SIGKILL)
    eventually(lambda: worker.template_pid, other_than=template)
    assert worker.child_pid == device
    os.kill(device, signal.SIGKILL)  # while the new template imports
    assert next_job_is_done(box)
    assert worker.process.poll() is None


def test_what_a_device_prints_is_in_its_log(box: Box, worker: WorkerProcess) -> None:
    assert "loaded m" in worker.device_log
    assert "loaded m" not in worker.log.read_text()


# The device process by itself, without a worker around it.


PARALLEL = """
import os, torch
from tests.worker.zoo import Affine

def num_threads():
    return len(os.listdir("/proc/self/task"))

def parallel():
    torch.set_num_threads(4)
    before = num_threads()
    torch.ones(2**22).add(1).sum()
    assert num_threads() >= before + 3, (before, num_threads())
    return Affine()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Box:
    return box_in(tmp_path_factory.mktemp("forked"))


@pytest.fixture(scope="module")
def device(folder: Box) -> Iterator[DeviceProcess]:
    device = device_of(folder)
    yield device
    device.close()


def register(folder: Box, source: str) -> None:
    folder.models_file.write_text(f'[models.m]\nbuilder = "python"\nsource = "{source}"\n')


def template_starting() -> int:
    """The template while it imports; it has no name of its own before it can fork."""
    python = Path(sys.executable).name
    return child_called(python, of=os.getpid(), argument="--template")


def test_a_start_whose_template_is_killed_is_tried_again(
    folder: Box, device: DeviceProcess
) -> None:
    register(folder, f"{zoo.__file__}:affine")
    device.close()
    killed: list[int] = []

    def kill_the_first() -> None:
        if not killed:
            with suppress(ValueError):  # it has not begun yet
                killed.append(template_starting())
                os.kill(killed[0], signal.SIGKILL)

    device.ensure(while_waiting=kill_the_first)
    assert killed
    assert device.ready
    assert child_called("gradbox-templ", of=os.getpid()) != killed[0]


def test_a_device_needs_no_template_once_it_is_forked(
    folder: Box, device: DeviceProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template dies of each fork, before it can do anything else."""
    (tmp_path / "sitecustomize.py").write_text(DYING_OF_A_FORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    register(folder, f"{zoo.__file__}:affine")
    device.close()
    device.ensure()
    assert device.ready
    assert child_called("gradbox-device", of=os.getpid()) == device.pid


def test_a_forked_device_computes_on_several_threads(folder: Box, device: DeviceProcess) -> None:
    builder = folder.folder / "builder.py"
    builder.write_text(PARALLEL)
    register(folder, f"{builder}:parallel")
    kill(device)
    device.ensure()
    (view,) = device.models
    assert view.usable, view.reason
    assert isinstance(device.run(work_of(folder, device), Watching()), Finished)


def test_a_template_with_a_thread_is_given_up(
    folder: Box,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    register(folder, f"{zoo.__file__}:affine")
    device = device_of(folder)
    try:
        with caplog.at_level(logging.WARNING):
            device.ensure()
        assert device.ready
        assert "it has 2 threads" in caplog.text
        assert "--template" not in Path(f"/proc/{device.pid}/cmdline").read_text()
    finally:
        device.close()


IMPORTED = """
import pathlib, sys
from gradbox_worker.device import forking
from gradbox_worker.device.importing import import_for_devices, import_for_jobs
import_for_devices(pathlib.Path(sys.argv[1]))
import_for_jobs()
print("transformers" in sys.modules)
print(forking.why_not_to_fork())
forking.DRIVERS, file = "/dev/zero", open("/dev/zero")
print(forking.why_not_to_fork())
import torch
torch.set_num_threads(4)
torch.ones(2**22).add(1)
print(forking.why_not_to_fork())
"""


def test_what_a_template_imports_starts_no_thread_and_no_cuda_and_else_it_says_so(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    models = tmp_path / "models.toml"
    models.write_text('[models.m]\nbuilder = "hf"\nsource = "prajjwal1/bert-tiny"\n')
    # However many threads those who run the tests allow.
    env = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", IMPORTED, str(models)]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    imported, imports_alone, driver, parallel = run.stdout.splitlines()
    assert imported == "True"
    assert imports_alone == "None"
    assert driver == "it has opened /dev/zero"
    assert parallel.endswith("threads, where it should have one")
