"""When a job's state is written, and when another attempt may go on from it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gradbox_engine import Checkpoint
from gradbox_service.store import Room
from gradbox_worker.computations.checkpoints import (
    SLOW_DISK_BYTES_PER_S,
    CheckpointFile,
    Pace,
)
from gradbox_worker.files.result_in_place import ResultOnDisk
from gradbox_worker.files.rounded_gradients import RoundedGradients

IDENTITY = {"spec_digest": "a", "model_version": "b"}


class Clock:
    """Stands still until told otherwise; `step_s` seconds pass between two looks."""

    def __init__(self) -> None:
        self.now = 100.0
        self.step_s = 0.0

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def checkpoint(
    folder: Path, *, attempt: int = 1, identity: Mapping[str, str] = IDENTITY, **given: Any
) -> CheckpointFile:
    """Return a file that may be written to at any time, unless it is told the time."""
    pace = Pace() if "clock" in given else Pace.after(0)
    return CheckpointFile(
        folder,
        job_id="j",
        attempt=attempt,
        identity=lambda: identity,
        **{"pace": pace, **given},
    )


def state(**facts: int) -> Checkpoint:
    return Checkpoint({"x": torch.ones(2)}, facts)


def write_taking(file: CheckpointFile, clock: Clock, seconds: float) -> None:
    """Write a state, which takes so long by the clock."""
    clock.step_s = seconds
    file.write(state())
    clock.step_s = 0.0


def test_a_short_job_writes_none(tmp_path: Path, clock: Clock) -> None:
    file = checkpoint(tmp_path, clock=clock)
    clock.now += 59
    assert not file.due()
    clock.now += 1
    assert file.due()


def test_the_next_one_is_due_half_a_minute_later(tmp_path: Path, clock: Clock) -> None:
    file = checkpoint(tmp_path, clock=clock)
    clock.now += 60
    write_taking(file, clock, 0.01)
    clock.now += 29
    assert not file.due()
    clock.now += 1
    assert file.due()


def test_writing_takes_three_percent_of_the_time_at_most(tmp_path: Path, clock: Clock) -> None:
    file = checkpoint(tmp_path, clock=clock)
    began, spent = clock.now, 0.0
    clock.now += 60
    for _ in range(5):
        while not file.due():
            clock.now += 1
        write_taking(file, clock, 3.0)
        spent += 3.0
    # The first one's cost is not known before it is written.
    assert spent - 3.0 <= 0.03 * (clock.now - began)


def test_a_large_first_one_waits_until_a_slow_disk_could_take_it(
    tmp_path: Path, clock: Clock
) -> None:
    file = checkpoint(tmp_path, clock=clock)
    large = Checkpoint({"x": torch.empty(SLOW_DISK_BYTES_PER_S, dtype=torch.uint8)}, {})
    clock.now += 32
    file.write(large)
    assert not list(tmp_path.iterdir())
    clock.now += 28
    assert file.due()
    file.write(large)
    assert list(tmp_path.iterdir())


def test_a_pace_of_zero_writes_one_after_every_shard(tmp_path: Path, clock: Clock) -> None:
    file = checkpoint(tmp_path, pace=Pace.after(0), clock=clock)
    clock.now += 0.1
    for _ in range(3):
        assert file.due()
        write_taking(file, clock, 3.0)


def test_another_attempt_knows_how_far_rows_were_rounded(tmp_path: Path) -> None:
    rows = torch.tensor([[1 + 2**-9, 0.0], [1 + 2**-9, 1.0]])[:, None]
    before, after = RoundedGradients("bf16"), RoundedGradients("bf16")
    before.rounded_rows("grads/w", rows)
    assert before.error == 2**-8
    checkpoint(tmp_path, rounding=before).write(state())
    assert checkpoint(tmp_path, attempt=2, rounding=after).read() is not None
    assert after.error == before.error


def test_a_job_counts_how_often_it_was_resumed(tmp_path: Path) -> None:
    first = checkpoint(tmp_path)
    assert first.read() is None
    first.write(Checkpoint())
    assert first.resumed == 0
    for resumed in (1, 2):
        file = checkpoint(tmp_path, attempt=1 + resumed)
        assert file.read() is not None
        assert file.resumed == resumed
        file.write(Checkpoint())


@pytest.mark.parametrize("key", IDENTITY)
def test_the_state_of_another_run_is_not_used(tmp_path: Path, key: str) -> None:
    checkpoint(tmp_path).write(state())
    other = checkpoint(tmp_path, attempt=2, identity=IDENTITY | {key: "other"})
    assert other.read() is None
    assert other.resumed == 0


def test_a_full_disk_costs_the_checkpoint_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = checkpoint(tmp_path)
    file.write(state(done=1))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        file.write(state(done=2))
    found = checkpoint(tmp_path, attempt=2).read()
    assert found is not None
    assert found.facts == {"done": 1}
    assert names(tmp_path) == {"j.safetensors"}


def test_it_goes_when_the_job_has_ended(tmp_path: Path) -> None:
    file = checkpoint(tmp_path)
    file.write(state())
    file.remove()
    assert names(tmp_path) == set()
    file.remove()  # of a job that never wrote one


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_state_that_is_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    file = checkpoint(tmp_path)
    file.write(Checkpoint({"x": torch.ones(4)}))
    found = file.read()
    file.write(Checkpoint({"x": torch.zeros(4)}))
    assert found is not None
    assert found.tensors["x"].tolist() == [1.0] * 4


@contextmanager
def rows_in_place(folder: Path, *, attempt: int) -> Iterator[tuple[ResultOnDisk, CheckpointFile]]:
    """Give an attempt at a job whose rows are written in place, and its checkpoint."""
    path = folder / "results" / f"j.{attempt}.safetensors"
    with ResultOnDisk(path, room=Room(folder)) as result:
        yield result, checkpoint(folder / "checkpoints", attempt=attempt, result=result)


def lay_out(result: ResultOnDisk) -> None:
    result.lay_out({"w": (2, 1, 3)}, {"w": torch.float32}, squeezed=True)


def test_a_checkpoint_counts_on_rows_in_place(tmp_path: Path) -> None:
    with rows_in_place(tmp_path, attempt=1) as (result, file):
        lay_out(result)
        file.write(state(done=1))
    assert names(tmp_path / "results") == set()
    assert names(tmp_path / "checkpoints") == {"j.safetensors", "j.1.rows"}
    with rows_in_place(tmp_path, attempt=2) as (_, file):
        found = file.read()
        assert found is not None
        assert found.facts == {"done": 1}
        assert file.resumed == 1
        file.remove()
    assert names(tmp_path / "checkpoints") == set()


def test_rows_that_were_cut_short_are_not_gone_on_with(tmp_path: Path) -> None:
    with rows_in_place(tmp_path, attempt=1) as (result, file):
        lay_out(result)
        file.write(state())
    os.truncate(tmp_path / "checkpoints" / "j.1.rows", 16)
    with rows_in_place(tmp_path, attempt=2) as (_, file):
        assert file.read() is None
    assert not names(tmp_path / "checkpoints")


def test_rows_are_flushed_before_a_checkpoint_counts_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[int, bool]] = []
    flush = os.fsync

    def noted(descriptor: int) -> None:
        flushed.append((os.fstat(descriptor).st_ino, (place / "j.safetensors").exists()))
        flush(descriptor)

    place = tmp_path / "checkpoints"
    with rows_in_place(tmp_path, attempt=1) as (result, file):
        lay_out(result)
        monkeypatch.setattr(os, "fsync", noted)
        file.write(state())
        rows = (place / "j.1.rows").stat().st_ino
    assert (rows, False) in flushed


def test_rows_that_another_process_still_writes_are_not_gone_on_with(tmp_path: Path) -> None:
    with rows_in_place(tmp_path, attempt=1) as (result, frozen):
        lay_out(result)
        frozen.write(state(done=1))
        with rows_in_place(tmp_path, attempt=2) as (_, file):
            assert file.read() is None
            assert file.resumed == 0
        frozen.write(state(done=2))
        with rows_in_place(tmp_path, attempt=3) as (_, file):
            assert file.read() is None


def test_what_is_of_no_use_leaves_the_disk(tmp_path: Path) -> None:
    with rows_in_place(tmp_path, attempt=1) as (result, file):
        lay_out(result)
        file.write(state())
    other = checkpoint(tmp_path / "checkpoints", attempt=2, identity={"model_version": "other"})
    assert other.read() is None
    assert names(tmp_path / "checkpoints") == set()


def test_a_disk_without_links_costs_the_checkpoint_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with rows_in_place(tmp_path, attempt=1) as (result, file):
        lay_out(result)
        file.write(state())
    assert checkpoint(tmp_path / "checkpoints", attempt=2).read() is None
