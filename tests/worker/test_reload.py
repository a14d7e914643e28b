"""A worker serves what can be built, and reads its models file again when that is asked for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from gradbox.errors import UnknownModel
from gradbox.protocol import JobState
from gradbox_service.fleet import WorkerPresence
from gradbox_service.fleet.workers import said_builds
from tests.worker import zoo
from tests.worker.box import Box, WorkerProcess, running_box, shards_of

CODE = """
from tests.worker import zoo

class Slow(zoo.Misbehaving):
    scale = {scale}

def slow(folder):
    return Slow(folder)
"""


def write_models(box: Box, *functions: str, scale: float = 1.0) -> None:
    """Register "slow", from a file of its own, beside functions of `zoo`."""
    (box.folder / "slow.py").write_text(CODE.format(scale=scale))
    blocks = [
        f'[models.slow]\nbuilder = "python"\nsource = "slow.py:slow"\n'
        f'kwargs = {{folder = "{box.folder}"}}\n'
    ]
    blocks += [
        f'[models.{name}]\nbuilder = "python"\nsource = "{zoo.__file__}:{name}"\n'
        for name in functions
    ]
    box.models_file.write_text("".join(blocks))


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with running_box(tmp_path_factory.mktemp("reload")) as box:
        write_models(box, "raises", "crashes", "affine")
        yield box


@pytest.fixture(scope="module")
def worker(box: Box) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(box)
    worker.wait_until_ready(timeout_s=120)  # two starts: the first one ends in a crash
    yield worker
    worker.stop()


def presence(box: Box) -> WorkerPresence:
    (found,) = box.backing.fleet.workers()
    return found


def wait_for(box: Box, holds: Callable[[WorkerPresence], bool]) -> WorkerPresence:
    deadline = time.monotonic() + 120
    while not holds(found := presence(box)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def reload(box: Box) -> WorkerPresence:
    asked = box.backing.fleet.ask_for_reload()
    return wait_for(box, lambda worker: worker.reloads == asked and worker.state == "idle")


def test_models_that_cannot_be_built_do_not_keep_the_rest_from_being_served(
    box: Box, worker: WorkerProcess
) -> None:
    found = presence(box)
    assert list(found.models) == ["slow", "affine"]
    assert "KeyError: 'no such checkpoint'" in found.unusable["raises"]
    assert "killed by SIGSEGV" in found.unusable["crashes"]
    record = box.wait(box.submit(box.spec(shards_of(1), model="affine")))
    assert record.state is JobState.DONE, record.error


@pytest.mark.slow  # tests/worker/test_device_restarts.py asks what a new device loads
def test_a_device_that_died_comes_back_without_building_what_is_known(
    box: Box, worker: WorkerProcess
) -> None:
    before = presence(box)
    os.kill(worker.child_pid, signal.SIGKILL)
    job = box.submit(box.spec(shards_of(1), model="slow"), version=before.models["slow"])
    assert box.wait(job).state is JobState.DONE
    after = wait_for(box, lambda found: found.state == "idle")
    assert (after.models, after.unusable) == (before.models, before.unusable)
    assert worker.log.read_text().count("the process that built it ended") == 1


def test_a_job_for_a_model_that_cannot_be_built_fails_with_the_reason(
    box: Box, worker: WorkerProcess
) -> None:
    record = box.wait(box.submit(box.spec(shards_of(1), model="raises"), version=""))
    assert record.error is not None
    assert record.error.code == "unusable-model"
    assert "no such checkpoint" in record.error.detail


def test_a_reload_offers_what_the_file_says_now_and_a_running_job_ends_as_it_began(
    box: Box, worker: WorkerProcess
) -> None:
    before = presence(box).models
    device = worker.child_pid
    box.order("sleep_at_first")
    job = box.submit(box.spec(shards_of(1), model="slow"))
    box.wait(job, lambda record: record.state is JobState.RUNNING)
    write_models(box, "affine", "tied", scale=2.0)
    asked = box.backing.fleet.ask_for_reload()
    time.sleep(0.5)
    assert worker.child_pid == device
    (box.folder / "order").unlink()
    record = box.wait(job)
    assert (record.state, record.model_version) == (JobState.DONE, before["slow"])
    after = wait_for(box, lambda found: found.reloads == asked and found.state == "idle")
    assert list(after.models) == ["slow", "affine", "tied"]
    assert after.unusable == {}
    assert after.models["affine"] == before["affine"]
    assert after.models["slow"] != before["slow"]
    assert worker.child_pid != device
    late = box.wait(box.submit(box.spec(shards_of(1), model="slow"), version=before["slow"]))
    with pytest.raises(UnknownModel, match="submit the job again"):
        raise late.error.error() if late.error is not None else AssertionError(late)


def test_a_file_with_a_mistake_leaves_the_models_as_they_are(
    box: Box, worker: WorkerProcess
) -> None:
    before = presence(box)
    text = box.models_file.read_text()
    mistakes = {
        "[models.x]\nbuilder = 'tf'\n": "models.x.builder: expected one of hf",
        "# Müller\n": "the byte 0xfc, which is not UTF-8",
    }
    for mistake, says in mistakes.items():
        box.models_file.write_text(text + mistake, encoding="latin-1")
        after = reload(box)
        assert after.models == before.models
        assert says in after.reload_error
    box.models_file.write_text(text)
    assert reload(box).reload_error == ""


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Box, WorkerProcess]]:
    """A box whose only worker begins with a model that hangs, and gives it three seconds."""
    with running_box(tmp_path_factory.mktemp("impatient")) as box:
        write_models(box, "hangs", "affine")
        worker = WorkerProcess(box, "--build-timeout-s", "3")
        while not box.backing.fleet.workers():
            assert worker.process.poll() is None
            time.sleep(0.05)
        yield box, worker
        worker.stop()


def builds_what_hangs(found: WorkerPresence) -> bool:
    return found.building is not None and found.building.model == "hangs"


def test_a_builder_that_hangs_is_named_and_then_left_out(
    impatient: tuple[Box, WorkerProcess],
) -> None:
    box, worker = impatient
    found = wait_for(box, builds_what_hangs)
    assert "building and trying the model 'hangs'" in worker.log.read_text()
    assert found.building is not None
    assert (found.state, found.models) == ("starting", {})
    assert abs(time.time() - found.building.since_s) < 60
    assert said_builds([found]).startswith("builds the model 'hangs' for ")
    found = wait_for(box, lambda worker: worker.state == "idle")
    assert list(found.models) == ["slow", "affine"]
    assert "models.hangs: expected it to be built and tried within 3 s" in found.unusable["hangs"]
    assert found.building is None


def test_the_models_of_before_serve_while_one_of_a_new_file_hangs(
    impatient: tuple[Box, WorkerProcess],
) -> None:
    box, _ = impatient
    before = wait_for(box, lambda worker: worker.state == "idle")
    write_models(box, "hangs", "tied", "affine", scale=2.0)
    asked = box.backing.fleet.ask_for_reload()
    found = wait_for(box, builds_what_hangs)
    assert (found.state, found.models) == ("idle", before.models)
    job = box.submit(box.spec(shards_of(1), model="affine"))
    record = box.wait(job, timeout_s=5)
    assert record.state is JobState.DONE, record.error
    assert presence(box).reloads < asked
    after = wait_for(box, lambda found: found.reloads == asked and found.state == "idle")
    assert list(after.models) == ["slow", "tied", "affine"]
    assert "within 3 s" in after.unusable["hangs"]
    assert after.models["slow"] != before.models["slow"]
    record = box.wait(box.submit(box.spec(shards_of(1), model="tied")))
    assert record.state is JobState.DONE, record.error
