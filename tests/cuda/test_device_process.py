"""A worker on CUDA whose device fails: one process ends, one job with it, and the next job runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradbox.protocol import JobState
from proofs.cuda import models
from tests.device import on_cuda_alone
from tests.worker import zoo
from tests.worker.box import Box, WorkerProcess, running_box, running_worker, shards_of

pytestmark = on_cuda_alone

WAIT_S = 120.0


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with running_box(tmp_path_factory.mktemp("cuda")) as box:
        box.models_file.write_text(
            f'[models.m]\nbuilder = "python"\nsource = "{models.__file__}:asserting"\n'
            f'[models.misbehaving]\nbuilder = "python"\nsource = "{zoo.__file__}:misbehaving"\n'
            f'kwargs = {{folder = "{box.folder}"}}\n'
        )
        yield box


@pytest.fixture(scope="module")
def worker(box: Box) -> Iterator[WorkerProcess]:
    with running_worker(box) as worker:
        yield worker


@pytest.fixture(autouse=True)
def _behaves_again(box: Box) -> Iterator[None]:
    yield
    Path(box.folder, "order").unlink(missing_ok=True)


def run(box: Box, shards: list[dict[str, Tensor]], *, model: str = "m") -> tuple[str, str]:
    """Run a job and return its state and what it says of an error."""
    record = box.wait(box.submit(box.spec(shards, model=model)), timeout_s=WAIT_S)
    return record.state, "" if record.error is None else record.error.detail


def assert_the_next_job_is_right(box: Box) -> None:
    shards = shards_of(3)
    record = box.wait(box.submit(box.spec(shards)), timeout_s=WAIT_S)
    assert record.state is JobState.DONE, record.error
    tensors, receipt = box.result(record)
    assert receipt.device.startswith("cuda:0 (")
    model = models.asserting()
    sum(model(shard["x"]).square().sum() for shard in shards).backward()
    expected = model.get_parameter("linear.weight").grad
    torch.testing.assert_close(tensors["grads/linear.weight"], expected)


def test_a_device_uses_cuda(box: Box, worker: WorkerProcess) -> None:
    assert_the_next_job_is_right(box)


def test_an_assertion_on_the_device_ends_one_process_and_one_job(
    box: Box, worker: WorkerProcess
) -> None:
    assert_the_next_job_is_right(box)
    device = worker.child_pid
    shards = shards_of(3)
    shards[1]["x"][0, 0] = 1000.0
    record = box.wait(box.submit(box.spec(shards)), timeout_s=WAIT_S)
    assert record.state is JobState.FAILED
    assert record.error is not None
    assert "assert" in record.error.detail
    assert record.attempt == 1  # it would end so again
    assert_the_next_job_is_right(box)
    assert worker.child_pid != device
    assert worker.process.poll() is None


def test_a_crash_in_native_code_ends_one_process(box: Box, worker: WorkerProcess) -> None:
    assert_the_next_job_is_right(box)
    device = worker.child_pid
    box.order("crash")
    state, said = run(box, shards_of(3), model="misbehaving")
    assert state is JobState.FAILED
    assert "SIGSEGV" in said
    assert_the_next_job_is_right(box)
    assert worker.child_pid != device


def test_memory_that_runs_out_ends_the_job_alone(box: Box, worker: WorkerProcess) -> None:
    assert_the_next_job_is_right(box)
    device = worker.child_pid
    box.order("allocate_on_device")
    state, said = run(box, shards_of(3), model="misbehaving")
    assert state is JobState.FAILED
    assert "does not fit into the device's memory" in said
    assert_the_next_job_is_right(box)
    assert worker.child_pid == device


def test_a_worker_that_is_told_to_stop_leaves_the_device_free(box: Box) -> None:
    free_before, _ = torch.cuda.mem_get_info()
    with running_worker(box, name="w2") as second:
        assert second.stop() == 0
    free_after, _ = torch.cuda.mem_get_info()
    assert free_after >= free_before - 64 * models.MIB
