"""A worker lives through its device: restarts, and what a new device process need not do again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from gradbox.protocol import JobState, ModelView
from gradbox_service.fleet import WorkerPresence
from gradbox_worker.device import DeviceProcess
from tests.worker import zoo
from tests.worker.box import Box, WorkerProcess, child_called, eventually, shards_of
from tests.worker.devices import box_in, device_of, kill


def register_affine(box: Box, *, num: int) -> None:
    box.models_file.write_text(
        "".join(
            f'[models.m{index}]\nbuilder = "python"\nsource = "{zoo.__file__}:affine"\n'
            for index in range(num)
        )
    )


def test_a_device_killed_as_it_starts_is_started_again_by_the_same_worker(
    box: Box, worker: WorkerProcess
) -> None:
    device = worker.child_pid
    for _ in range(6):  # the first was ready
        os.kill(device, signal.SIGKILL)
        device = eventually(lambda: worker.child_pid, other_than=device)
    assert worker.process.poll() is None
    job = box.submit(box.spec(shards_of(2), model="m0"), version=version_of(box, worker, "m0"))
    assert box.wait(job).state is JobState.DONE
    assert worker.child_pid == device


@pytest.mark.parametrize(
    ("order", "left"),
    [
        ("leave_files_open", JobState.DONE),
        ("lower_the_limit_of_open_files", JobState.FAILED),
    ],
)
def test_another_device_runs_the_job_behind_one_that_left_too_few_files(
    order: str, left: JobState, box: Box, worker: WorkerProcess
) -> None:
    box.order(order)
    assert box.wait(box.submit(box.spec(shards_of(2)))).state is left
    (box.folder / "order").unlink()
    device = worker.child_pid
    record = box.wait(box.submit(box.spec(shards_of(2))))
    assert (record.state, record.attempt, record.losses) == (JobState.DONE, 1, 0)
    assert worker.child_pid != device


def test_a_new_device_loads_only_the_model_that_a_job_needs(
    box: Box, worker: WorkerProcess
) -> None:
    loads = worker.device_log.count("loaded m")
    os.kill(worker.child_pid, signal.SIGKILL)
    job = box.submit(box.spec(shards_of(2), model="m7"), version=version_of(box, worker, "m7"))
    assert box.wait(job).state is JobState.DONE
    log = worker.device_log
    assert log.count("loaded m") == loads + 1
    assert log.rpartition("loaded m")[2].startswith("7 ")


def test_the_models_are_announced_while_a_new_device_starts(
    box: Box, worker: WorkerProcess
) -> None:
    before = presence(box, worker)
    os.kill(worker.child_pid, signal.SIGKILL)
    states = set()
    while "starting" not in states or presence(box, worker).state != "idle":
        found = presence(box, worker)
        assert found.models == before.models
        states.add(found.state)
        time.sleep(0.02)


def version_of(box: Box, worker: WorkerProcess, model: str) -> str:
    return presence(box, worker).models[model]


def presence(box: Box, worker: WorkerProcess) -> WorkerPresence:
    return next(found for found in box.backing.fleet.workers() if found.name == worker.name)


# The device process by itself, without a worker around it.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Box:
    return box_in(tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="module")
def device(folder: Box) -> Iterator[DeviceProcess]:
    device = device_of(folder)
    yield device
    device.close()


def names(models: list[ModelView]) -> list[str]:
    return [model.name for model in models]


def test_an_interrupted_wait_goes_on_with_the_processes_that_were_started(
    folder: Box, device: DeviceProcess
) -> None:
    register_affine(folder, num=1)

    def store_is_away() -> None:
        raise ConnectionError

    def store_is_away_once_forked() -> None:
        if device.pid is not None:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        device.ensure(while_waiting=store_is_away)
    template = eventually(lambda: child_called("gradbox-templ", of=os.getpid()))
    with pytest.raises(ConnectionError):
        device.ensure(while_waiting=store_is_away_once_forked)
    started = device.pid
    assert started is not None
    device.ensure()
    assert device.pid == started
    assert child_called("gradbox-templ", of=os.getpid()) == template
    assert names(device.models) == ["m0"]


def test_a_models_file_that_has_changed_is_described_anew(
    folder: Box, device: DeviceProcess
) -> None:
    register_affine(folder, num=1)
    device.ensure()
    assert names(device.models) == ["m0"]
    kill(device)
    register_affine(folder, num=2)
    device.ensure()
    assert names(device.models) == ["m0", "m1"]


def test_a_builder_that_crashes_is_not_tried_again(folder: Box, device: DeviceProcess) -> None:
    folder.models_file.write_text(
        f'[models.m]\nbuilder = "python"\nsource = "{zoo.__file__}:crashes"\n'
    )
    kill(device)
    pids = set()

    def note() -> None:
        pids.add(device.pid)

    device.ensure(while_waiting=note)
    assert len(pids - {None}) == 2
    (view,) = device.models
    assert not view.usable
    assert "SIGSEGV: a crash in native code" in view.reason


def test_a_builder_that_is_killed_again_and_again_leaves_the_others_to_be_served(
    folder: Box, device: DeviceProcess
) -> None:
    folder.models_file.write_text(
        "".join(
            f'[models.{name}]\nbuilder = "python"\nsource = "{zoo.__file__}:{function}"\n'
            for name, function in (("a", "is_killed"), ("b", "affine"), ("c", "is_killed"))
        )
    )
    kill(device)
    device.ensure()
    assert sorted(view.name for view in device.models if view.usable) == ["b"]
    reasons = [view.reason for view in device.models if not view.usable]
    assert len(reasons) == 2
    assert all("killed by SIGKILL" in reason for reason in reasons)


def test_a_killed_start_is_tried_again(folder: Box, device: DeviceProcess) -> None:
    register_affine(folder, num=1)
    kill(device)
    killed: set[int] = set()

    def kill_the_first_two() -> None:
        if device.pid is not None and len(killed) < 2:
            killed.add(device.pid)
            os.kill(device.pid, signal.SIGKILL)

    device.ensure(while_waiting=kill_the_first_two)
    assert device.ready
    assert len(killed) == 2
