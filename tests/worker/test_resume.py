"""A long job whose device, worker or box is killed goes on from its last checkpoint."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradbox.protocol import JobState
from tests.worker.box import (
    Box,
    register_misbehaving,
    running,
    running_box,
    running_worker,
    shards_of,
)

NUM_SHARDS = 60
OFTEN = ("--checkpoint-after-s", "0.4")


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with running_box(tmp_path) as box:
        register_misbehaving(box)
        yield box


def wait_for_replay(box: Box, job: str, *, shard: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        record = box.record(job)
        progress = record.progress
        if progress is not None and progress.phase == "replay" and progress.done >= shard:
            return
        assert not record.state.final, record
        time.sleep(0.01)
    raise AssertionError("the job never came so far")


@pytest.mark.parametrize("killed", ["device", "worker"])
def test_a_killed_job_goes_on_from_its_checkpoint(box: Box, killed: str) -> None:
    shards = shards_of(NUM_SHARDS)
    with running_worker(box, *OFTEN) as worker:
        undisturbed = box.wait(box.submit(box.spec(shards, mode="train", retain=0)))
        expected, _ = box.result(undisturbed)
        box.order("sleep")
        job = box.submit(box.spec(shards, mode="train", retain=0, name="long"))
        box.wait(job, running)
        wait_for_replay(box, job, shard=50)
        assert list((box.folder / "checkpoints").glob(f"{job}.*"))
        if killed == "device":
            os.kill(worker.child_pid, signal.SIGKILL)
            record = box.wait(job, timeout_s=60)
        else:
            worker.stop(signal.SIGKILL)
            with running_worker(box, *OFTEN):
                record = box.wait(job, timeout_s=90)
    assert record.state is JobState.DONE, record.error
    found, receipt = box.result(record)
    assert (receipt.attempts, receipt.resumed) == (2, 1)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not list((box.folder / "checkpoints").glob("*"))
    # 0.05 s a call: the second attempt ran what the first had not done, and little more.
    assert receipt.seconds.forward is not None
    assert receipt.seconds.forward < 0.05
    assert receipt.seconds.replay is not None
    assert receipt.seconds.replay < 0.05 * 40


def test_a_cancelled_job_leaves_no_checkpoint(box: Box) -> None:
    box.order("sleep")
    with running_worker(box, *OFTEN):
        job = box.submit(box.spec(shards_of(NUM_SHARDS), retain=0))
        wait_for_replay(box, job, shard=5)
        box.cancel(job)
        assert box.wait(job).state is JobState.CANCELLED
    assert not list((box.folder / "checkpoints").glob("*"))
