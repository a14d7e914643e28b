"""Runs and saved states in Redis.

    gradbox:run…, save…        records as `database.owned` has them; both count as bytes of runs
    gradbox:run-steps:ID       hash: number → the digest of the step's content, and the step, JSON
    gradbox:run-key:OWNER:HASH the run that was made under an idempotency key, and its digest
    gradbox:run-weights:ID:N:WHO  the job whose result has the weights after step N, for WHO

What a job changes of a run is written beside the job's record (`Beside`): a step that is done is
counted, and one that is counted is done. A step's spec is that of its job.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Final, cast

import redis
from redis.client import Pipeline

from gradbox.errors import IdempotencyConflict, RunConflict
from gradbox.protocol import StepView
from gradbox_service.database.conditional_commands import Beside
from gradbox_service.database.owned import OwnedRecords
from gradbox_service.runs.record import RunRecord, SaveRecord, save_id

REMEMBERED_S: Final = 7 * 24 * 3600


class Runs(OwnedRecords[RunRecord]):
    """The runs of a box, with their steps and saved states."""

    def __init__(self, connection: redis.Redis) -> None:
        super().__init__(connection, RunRecord, "run")
        self._saves = OwnedRecords(connection, SaveRecord, "save", counted_as="run")

    def create(self, run: RunRecord, *, idempotency_key: str | None, digest: str) -> RunRecord:
        """Store a run, or return the one that its owner made before under the same key.

        Args:
            digest: of what was posted.

        Raises:
            IdempotencyConflict: the key was used with another run.
        """
        if idempotency_key is None:
            return self.keep(run)
        key = _posted_key(run.owner, idempotency_key)
        made = self.keep(run, under=key, noted=digest, lifetime_s=REMEMBERED_S)
        return self.posted(run.owner, idempotency_key, digest=digest) or made

    def posted(self, owner: str, idempotency_key: str, *, digest: str) -> RunRecord | None:
        """Return the run that an owner made under a key, if there is one.

        Raises:
            IdempotencyConflict: the key was used with another run.
        """
        run, earlier = self.named(_posted_key(owner, idempotency_key))
        if run is not None and earlier != digest:
            raise IdempotencyConflict(
                f"the Idempotency-Key {idempotency_key!r} came before with another run; send a new "
                f"key with a new run"
            )
        return run

    # --- steps -----------------------------------------------------------------------------------

    def posting(self, run: RunRecord, *, job: str, digest: str) -> Beside:
        """Return what is written with the job of a run's next step.

        Raises:
            Outdated: the run has changed.
        """
        return self.replacing(run, run.posted(job=job, digest=digest))

    def making(self, run_id: str, step: StepView) -> Beside:
        """Return what is written with the end of a step's job.

        Raises:
            RunConflict: it is not the run's next step, or another job is to make that.
        """
        run, text = self._read(run_id)
        after = None if run is None else run.made(step)
        if run is None or after is None:
            where = "is not there any more" if run is None else f"is at step {run.num_steps}"
            raise RunConflict(
                f"expected job {step.job} to make step {step.number} of run {run_id}, but the run "
                f"{where}",
                num_steps=None if run is None else run.num_steps,
            )
        line = f"{run.posted_digest} {step.model_dump_json()}"

        def write(pipe: Pipeline) -> None:
            pipe.hset(steps_key(run_id), str(step.number), line)

        return self._put(run, after, read=text, more=write)

    def written(self, run_id: str, steps: Collection[int], *, size_bytes: int) -> None:
        """Note of which steps there are state files, and what they take together."""
        self.change(run_id, lambda run: run.written(steps, size_bytes=size_bytes))

    def history(self, run_id: str, *, after: int, limit: int) -> Sequence[StepView]:
        """Return steps in their order, those behind number `after`."""
        return [view for view, _ in self._steps(run_id, range(after + 1, after + 1 + limit))]

    def step(self, run_id: str, number: int) -> tuple[StepView, str] | None:
        """Return a step that was made, and the digest of its content."""
        return next(iter(self._steps(run_id, [number])), None)

    def last_steps(self, runs: Sequence[RunRecord]) -> Sequence[StepView | None]:
        """Return the last step of each run; None where it has made none."""
        with self._redis.pipeline(transaction=False) as pipe:
            for run in runs:
                pipe.hget(steps_key(run.id), str(run.num_steps))
            lines = pipe.execute()
        return [None if line is None else _read_step(line)[0] for line in lines]

    def kept(self, run: RunRecord) -> Sequence[StepView]:
        """Return the steps that may have to be made again, in their order."""
        return [view for view, _ in self._steps(run.id, _kept_numbers(run))]

    def jobs_of_kept(self) -> Sequence[str]:
        """Return the jobs of those steps, of all runs."""
        runs = [run for run in self.all() if _kept_numbers(run)]
        with self._redis.pipeline(transaction=False) as pipe:
            for run in runs:
                pipe.hmget(steps_key(run.id), [str(number) for number in _kept_numbers(run)])
            found = [line for lines in pipe.execute() for line in lines if line is not None]
        return [_read_step(line)[0].job for line in found]

    # --- what is made of states ------------------------------------------------------------------

    def saves(self, owner: str) -> Sequence[SaveRecord]:
        """Return the states that an owner saved, or is about to, by name."""
        return sorted(self._saves.owned(owner), key=lambda save: save.name)

    def save(self, owner: str, name: str) -> SaveRecord | None:
        """Return what an owner saved under a name."""
        return self._saves.get(save_id(owner, name))

    def jobs_of_saves(self) -> Sequence[str]:
        """Return the jobs that wrote saved states, or are about to."""
        return [save.job for save in self._saves.all()]

    def saving(self, save: SaveRecord, *, before: SaveRecord | None) -> Beside:
        """Return what is written with the job that saves a state, in place of an earlier one.

        Raises:
            Outdated: that has changed.
        """
        return self._saves.replacing(before, save)

    def saved(self, run_id: str, name: str, *, job: str, size_bytes: int) -> Beside:
        """Return what is written with the end of the job that saved a state.

        Raises:
            RunConflict: the name is not for that job any more.
        """
        run = self.get(run_id)
        save = None if run is None else self.save(run.owner, name)
        if save is None or save.job != job:
            raise RunConflict(f"expected job {job} to save {name!r} of run {run_id}, which is gone")
        return self._saves.replacing(save, replace(save, size_bytes=size_bytes))

    def share(self, save: SaveRecord, *, shared: bool) -> None:
        """Note whether everybody may read a save.

        Raises:
            Outdated: it has changed.
        """
        self._saves.write(self._saves.replacing(save, replace(save, shared=shared)))

    def unsave(self, save: SaveRecord) -> None:
        """Forget a save; its file is the caller's to remove.

        Raises:
            Outdated: it has changed.
        """
        self._saves.forget(save)

    def weights_job(self, caller: str, run_id: str, step: int) -> str:
        """Return the job that somebody was last answered with who asked for weights; "" if none."""
        found = cast("bytes | None", self._redis.get(_weights_key(caller, run_id, step)))
        return (found or b"").decode()

    def asking(self, caller: str, run_id: str, step: int, *, job: str, before: str) -> Beside:
        """Return what is written with the job that answers with weights."""
        key = _weights_key(caller, run_id, step)

        def write(pipe: Pipeline) -> None:
            pipe.set(key, job, ex=REMEMBERED_S)

        return Beside(write, {key: before})

    def _steps(self, run_id: str, numbers: Sequence[int]) -> Iterator[tuple[StepView, str]]:
        if not numbers:
            return
        lines = self._redis.hmget(steps_key(run_id), [str(number) for number in numbers])
        for line in cast("list[bytes | None]", lines):
            if line is not None:
                yield _read_step(line)

    def _keys_beside(self, record: RunRecord) -> Sequence[str]:
        return [steps_key(record.id)]


def _kept_numbers(run: RunRecord) -> Sequence[int]:
    return range(run.kept_after + 1, run.num_steps + 1)


def _read_step(line: bytes) -> tuple[StepView, str]:
    digest, _, view = line.partition(b" ")
    return StepView.model_validate_json(view), digest.decode()


def steps_key(run_id: str) -> str:
    return f"gradbox:run-steps:{run_id}"


def _weights_key(caller: str, run_id: str, step: int) -> str:
    return f"gradbox:run-weights:{run_id}:{step}:{caller}"


def _posted_key(owner: str, idempotency_key: str) -> str:
    digest = hashlib.sha256(idempotency_key.encode()).hexdigest()
    return f"gradbox:run-key:{owner}:{digest}"
