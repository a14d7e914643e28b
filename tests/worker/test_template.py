"""The process that has imported torch, and that device processes are forked from."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradbox.protocol import JobState
from gradbox_service.backing import Backing
from gradbox_worker.device import DeviceProcess, DeviceSettings
from gradbox_worker.work import Finished, StopOrder, Work
from tests.worker import zoo
from tests.worker.box import (
    Box,
    WorkerProcess,
    child_called,
    eventually,
    running_box,
    running_worker,
    shards_of,
)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with running_box(tmp_path_factory.mktemp("template")) as box:
        builder = box.folder / "builder.py"
        builder.write_text(
            Path(zoo.__file__).read_text()
            + "\nimport numpy\n"
            + f"with open({str(drawn_by_devices(box))!r}, 'a') as file:\n"
            + "    print(numpy.random.random(), file=file)\n"
        )
        box.models_file.write_text(f'[models.m]\nbuilder = "python"\nsource = "{builder}:affine"\n')
        yield box


@pytest.fixture(scope="module")
def worker(box: Box) -> Iterator[WorkerProcess]:
    log = box.folder / "logs" / "device.log"
    with running_worker(box, "--device-log", str(log)) as worker:
        yield worker


def drawn_by_devices(box: Box) -> Path:
    """A line for each device process that built the model: a number that NumPy drew."""
    return box.folder / "drawn"


def next_job_is_done(box: Box) -> bool:
    version = box.backing.fleet.workers()[0].models["m"]
    return box.wait(box.submit(box.spec(shards_of(2)), version=version)).state is JobState.DONE


def test_a_device_that_was_killed_is_replaced_from_the_same_template(
    box: Box, worker: WorkerProcess
) -> None:
    device, template = worker.child_pid, worker.template_pid
    assert len(drawn_by_devices(box).read_text().splitlines()) == 1  # by the first device alone
    os.kill(device, signal.SIGKILL)
    assert next_job_is_done(box)
    assert worker.child_pid not in (device, template)
    assert worker.template_pid == template


def test_devices_of_one_template_draw_different_numbers(box: Box, worker: WorkerProcess) -> None:
    os.kill(worker.child_pid, signal.SIGKILL)
    assert next_job_is_done(box)
    drawn = drawn_by_devices(box).read_text().splitlines()
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
    assert "loaded m" in (box.folder / "logs" / "device.log").read_text()
    assert "loaded m" not in worker.log.read_text()


def test_a_worker_that_ends_leaves_no_template(box: Box, worker: WorkerProcess) -> None:
    template = eventually(lambda: worker.template_pid)
    assert worker.stop() == 0
    assert not Path(f"/proc/{template}").exists()


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


class Watching:
    """Supervision that lets the job run."""

    def progress(self, phase: str, done: int, total: int) -> None: ...
    def poll(self) -> StopOrder | None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Box:
    folder = tmp_path_factory.mktemp("forked")
    return Box(folder, Backing.in_memory(folder))


@pytest.fixture(scope="module")
def device(folder: Box) -> Iterator[DeviceProcess]:
    device = device_of(folder)
    yield device
    device.close()


def device_of(folder: Box) -> DeviceProcess:
    settings = DeviceSettings(models_file=folder.models_file, data=folder.folder, device="cpu")
    return DeviceProcess(settings)


def register(folder: Box, source: str) -> None:
    folder.models_file.write_text(f'[models.m]\nbuilder = "python"\nsource = "{source}"\n')


def test_a_start_whose_template_is_killed_is_tried_again(
    folder: Box, device: DeviceProcess
) -> None:
    register(folder, f"{zoo.__file__}:affine")
    device.close()
    killed: list[int] = []

    def kill_the_first() -> None:
        if not killed:
            killed.append(eventually(lambda: child_called("gradbox-templ", of=os.getpid())))
            os.kill(killed[0], signal.SIGKILL)

    device.ensure(while_waiting=kill_the_first)
    assert device.ready
    assert child_called("gradbox-templ", of=os.getpid()) != killed[0]


def test_a_forked_device_computes_on_several_threads(folder: Box, device: DeviceProcess) -> None:
    builder = folder.folder / "builder.py"
    builder.write_text(PARALLEL)
    register(folder, f"{builder}:parallel")
    device.kill()
    while device.ready:
        time.sleep(0.01)
    device.ensure()
    (view,) = device.models
    assert view.usable, view.reason
    work = Work(
        job_id="j",
        attempt=1,
        model="m",
        model_version=view.version,
        spec=folder.spec(shards_of(3)),
        result_path=folder.folder / "results" / "j.1.safetensors",
        queued_s=0.0,
    )
    assert isinstance(device.run(work, Watching()), Finished)


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
