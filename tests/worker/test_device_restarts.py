"""A worker lives through its device: restarts, and what a new device process need not do again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from gradbox.protocol import JobState, ModelBuild
from gradbox_service.database.connection import connect
from gradbox_service.fleet import WorkerPresence
from gradbox_worker.device import DeviceProcess, DeviceSettings
from gradbox_worker.device.builds import KILLED_AT_MOST, Builds
from gradbox_worker.device.entry import DeviceEntries
from gradbox_worker.device.exits import exit_of
from gradbox_worker.device.settings import TurnSettings
from gradbox_worker.errors import DeviceNotStarted
from tests.worker import zoo
from tests.worker.box import Box, WorkerProcess, eventually, running_box, shards_of


def register_affine(box: Box, *, num: int) -> None:
    box.models_file.write_text(
        "".join(
            f'[models.m{index}]\nbuilder = "python"\nsource = "{zoo.__file__}:affine"\n'
            for index in range(num)
        )
    )


@pytest.mark.slow  # of a device by itself, test_a_killed_start_is_tried_again asks it
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
        pytest.param("lower_the_limit_of_open_files", JobState.FAILED, marks=pytest.mark.slow),
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with running_box(tmp_path_factory.mktemp("device")) as box:
        yield box


@pytest.fixture(scope="module")
def device(folder: Box) -> Iterator[DeviceProcess]:
    settings = DeviceSettings(models_file=folder.models_file, data=folder.folder, device="cpu")
    turns = TurnSettings(worker="w", redis_url=folder.redis_url, lease_s=60.0)
    entries = DeviceEntries(connect(folder.redis_url), "w")
    device = DeviceProcess(settings, turns, entries=entries)
    yield device
    device.close()


def kill(device: DeviceProcess) -> None:
    """Kill the process, if one runs, and have that noticed."""
    if device.pid is not None:
        device.kill()
        ended = None
        while ended is None:
            ended = device.look()
        device.note_end(ended)


def until_ready(device: DeviceProcess, look: Callable[[], object] = lambda: None) -> None:
    """Do what a worker does until its device is ready."""
    while not device.ready:
        ended = device.look()
        look()
        if ended is not None:
            device.note_end(ended)
        device.wait(0.02)


def test_a_models_file_that_has_changed_is_described_anew(
    folder: Box, device: DeviceProcess
) -> None:
    register_affine(folder, num=1)
    until_ready(device)
    assert list(device.models) == ["m0"]
    kill(device)
    register_affine(folder, num=2)
    until_ready(device)
    assert list(device.models) == ["m0", "m1"]


def test_a_builder_that_crashes_is_not_tried_again(folder: Box, device: DeviceProcess) -> None:
    folder.models_file.write_text(
        f'[models.m]\nbuilder = "python"\nsource = "{zoo.__file__}:crashes"\n'
    )
    kill(device)
    pids = set()

    def note() -> None:
        pids.add(device.pid)

    until_ready(device, note)
    assert len(pids - {None}) == 2
    assert device.models == {}
    assert "SIGSEGV: a crash in native code" in device.unusable["m"]


def test_a_model_is_left_out_when_the_process_that_builds_it_was_killed_three_times() -> None:
    builds = Builds(timeout_s=600.0)
    for name in ("a", "c"):
        for times in range(1, KILLED_AT_MOST + 1):
            builds.note(ModelBuild(model=name, since_s=time.time()))
            left_out = builds.left_out_after(exit_of(-signal.SIGKILL))
            assert (left_out is None) == (times < KILLED_AT_MOST)
        assert left_out is not None
        assert (left_out.name, left_out.usable) == (name, False)
        assert "killed by SIGKILL" in left_out.reason


@pytest.mark.slow  # seven starts; a crash, and the counting of kills, are asked above
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
    until_ready(device)
    assert list(device.models) == ["b"]
    assert sorted(device.unusable) == ["a", "c"]
    assert all("killed by SIGKILL" in reason for reason in device.unusable.values())


def test_a_killed_start_is_tried_again(folder: Box, device: DeviceProcess) -> None:
    register_affine(folder, num=1)
    kill(device)
    killed: set[int] = set()

    def kill_the_first_two() -> None:
        if device.pid is not None and len(killed) < 2:
            killed.add(device.pid)
            device.kill()

    until_ready(device, kill_the_first_two)
    assert len(killed) == 2
    assert device.pid not in killed


def test_a_device_whose_models_file_is_wrong_says_so_and_is_not_started_again(
    folder: Box, device: DeviceProcess
) -> None:
    kill(device)
    folder.models_file.write_text("[models.m]\nbuilder = 'hf'")
    with pytest.raises(DeviceNotStarted, match="expected a non-empty string"):
        until_ready(device)
