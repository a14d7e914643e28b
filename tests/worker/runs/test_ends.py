"""A step's job and its run end in one write, whatever Redis and the run do meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from gradbox.errors import RunConflict
from gradbox.protocol import JobState, OptimizerSpec, ResultView, RunSpec, StateRef, StateSpec
from gradbox_service.backing import Backing
from gradbox_service.runs import RunRecord, SaveRecord
from gradbox_worker.work import Finished, StepMade
from tests.valkey import empty_backing
from tests.worker.box import Box, shards_of
from tests.worker.test_turn import LosesAnswers, runner

RESULT = ResultView(size_bytes=3, sha256="0" * 64)
MADE = Finished(RESULT, b"abc", StepMade("r", 1, 0.5, 2.0, [1e-3]))
RUN = RunRecord(
    id="r",
    owner="ann",
    spec=RunSpec(model="m", optimizer=OptimizerSpec(name="sgd")),
    model="m",
    model_version="v",
    created_s=1.0,
)


def posted(box: Box) -> str:
    """Return a job that is to make the run's first step."""
    backing = box.backing
    backing.runs.create(RUN, idempotency_key=None, digest="d")
    job = box.submit(box.spec(shards_of(1)))
    written(backing, RUN.posted(job=job, digest="content"))
    return job


def written(backing: Backing, run: RunRecord) -> None:
    backing.records._redis.set(f"gradbox:run:{run.id}", run.to_json())


@pytest.mark.parametrize("error", [None, redis.ConnectionError("reset")], ids=["watch", "away"])
@pytest.mark.parametrize("loses", [False, True], ids=["heard", "lost"])
def test_a_step_that_is_done_is_counted_once(
    tmp_path: Path, error: Exception | None, loses: bool
) -> None:
    backing = empty_backing(tmp_path)
    if loses:
        lossy = LosesAnswers(backing, JobState.DONE, error)
        backing = dataclasses.replace(backing, records=lossy)
    box = Box(tmp_path, backing)
    job = posted(box)
    assert runner(box, lambda work, supervision: MADE).run(job) == "done"
    run = backing.runs.get("r")
    assert run is not None
    assert (run.num_steps, run.last_job, run.loss, run.posted_job) == (1, job, 0.5, "")
    made = backing.runs.step("r", 1)
    assert made is not None
    assert (made[0].job, made[0].lr, made[1]) == (job, [1e-3], "content")
    assert box.record(job).finished_s == made[0].finished_s == run.last_step_s


def test_what_is_written_of_a_run_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box(tmp_path, empty_backing(tmp_path))
    job = posted(box)
    making = box.backing.runs.making

    def raced(*given: Any) -> Any:
        beside = making(*given)
        box.backing.runs.written("r", [0], size_bytes=7)
        monkeypatch.undo()
        return beside

    monkeypatch.setattr(box.backing.runs, "making", raced)
    assert runner(box, lambda work, supervision: MADE).run(job) == "done"
    run = box.backing.runs.get("r")
    assert run is not None
    assert (run.num_steps, run.state_step, run.state_bytes) == (1, 0, 7)
    assert box.backing.runs.totals()["ann"] == 7


@pytest.mark.parametrize(
    "moved",
    [
        lambda backing, run: backing.runs.forget(backing.runs.get("r")),
        lambda backing, run: written(backing, dataclasses.replace(run, num_steps=1)),
        lambda backing, run: written(backing, run.posted(job="other", digest="d")),
    ],
    ids=["deleted", "at another step", "another job makes it"],
)
def test_a_step_that_its_run_does_not_take_fails(
    tmp_path: Path, moved: Callable[[Backing, RunRecord], object]
) -> None:
    box = Box(tmp_path, empty_backing(tmp_path))
    job = posted(box)
    moved(box.backing, RUN.posted(job=job, digest="content"))
    before = box.backing.runs.get("r")
    assert runner(box, lambda work, supervision: MADE).run(job) == "failed"
    record = box.record(job)
    assert record.error is not None
    assert isinstance(record.error.error(), RunConflict)
    assert box.backing.runs.get("r") == before
    assert box.backing.results.use_of(job, attempt=1) is None


def test_a_state_is_saved_with_the_end_of_its_job(tmp_path: Path) -> None:
    box = Box(tmp_path, empty_backing(tmp_path))
    runs, state = box.backing.runs, StateRef(run="r", step=0)
    runs.create(RUN, idempotency_key=None, digest="d")
    job = box.submit(StateSpec(computation="state", model="m", state=state, save="good"))
    save = SaveRecord.of(RUN, "good", step=0, job=job, shared=False, now_s=1.0)
    pipe = box.backing.records._redis.pipeline()
    runs.saving(save, before=None).write(pipe)
    pipe.execute()
    saved = Finished(RESULT, b"abc", saved_bytes=9)
    assert runner(box, lambda work, supervision: saved).run(job) == "done"
    assert runs.save("ann", "good") == dataclasses.replace(save, size_bytes=9)
    assert runs.totals()["ann"] == 9
    again = box.submit(StateSpec(computation="state", model="m", state=state, save="good"))
    assert runner(box, lambda work, supervision: saved).run(again) == "failed"
    assert runs.totals()["ann"] == 9
