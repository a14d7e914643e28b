"""The device process by itself, where its worker or its model does what it should not."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from gradbox_worker.device import DeviceProcess
from gradbox_worker.device.exits import exit_of
from gradbox_worker.work import Died, Finished
from tests.worker.box import Box, receipt_at, register_misbehaving
from tests.worker.devices import Watching, box_in, device_of, work_of


class Failing(Watching):
    """Supervision that breaks as soon as the job runs."""

    def progress(self, phase: str, done: int, total: int) -> None:
        raise ArithmeticError


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Box:
    box = box_in(tmp_path_factory.mktemp("device"))
    register_misbehaving(box)
    return box


@pytest.fixture(scope="module")
def device(box: Box) -> Iterator[DeviceProcess]:
    device = device_of(box)
    device.ensure()
    yield device
    device.close()


def test_a_watcher_that_fails_does_not_leave_an_answer_for_the_next_job(
    box: Box, device: DeviceProcess
) -> None:
    with pytest.raises(ArithmeticError):
        device.run(work_of(box, device, seed=1), Failing())
    work = work_of(box, device, seed=2)
    assert isinstance(device.run(work, Watching()), Finished)
    assert receipt_at(work.result_path).seed == 2


def test_a_death_is_noticed_while_the_models_own_child_lives_on(
    box: Box, device: DeviceProcess
) -> None:
    box.order("die_leaving_a_child")
    began = time.monotonic()
    outcome = device.run(work_of(box, device), Watching())
    (box.folder / "order").unlink()
    assert outcome == Died("it was killed by SIGKILL, perhaps by the kernel for lack of memory")
    assert time.monotonic() - began < 50  # the child lives for 60 s


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (3, "it exited with code 3"),
        (-11, "it was killed by SIGSEGV: a crash in native code"),
        (-6, "it was killed by SIGABRT: an abort in native code"),
        (-99, "it was killed by signal 99"),
    ],
)
def test_how_a_process_ended_in_words(code: int, says: str) -> None:
    assert exit_of(code).reason == says


@pytest.mark.parametrize(
    ("code", "num_oom_kills", "fault"),
    [
        (3, 0, "exit code 3"),
        (-11, 0, "SIGSEGV"),
        (-9, 0, None),
        (-9, 1, "killed by the kernel for lack of memory"),
        (-15, 0, None),
    ],
)
def test_only_what_a_process_did_itself_is_its_fault(
    code: int, num_oom_kills: int, fault: str | None
) -> None:
    assert exit_of(code, num_oom_kills=num_oom_kills).fault == fault
