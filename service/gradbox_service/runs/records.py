"""Runs and saved states in Redis.

    gradbox:run:ID             record, JSON
    gradbox:runs               zset of all ids by creation
    gradbox:runs:OWNER         the same of one owner's
    gradbox:run-steps:ID       hash: number → the digest of the step's content, and the step, JSON
    gradbox:run-key:OWNER:HASH the run that was made under an idempotency key, and its digest
    gradbox:run-weights:ID:N:WHO  the job whose result has the weights after step N, for WHO
    gradbox:save:OWNER:NAME    a saved state, JSON
    gradbox:saves:OWNER        set of the names of those
    gradbox:run-bytes          hash: owner → bytes of their state files and saves

What a job changes of a run is written beside the job's record (`Beside`): a step that is done is
counted, and one that is counted is done. A step's spec is that of its job.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import redis
from redis.client import Pipeline

from gradbox.errors import IdempotencyConflict, RunConflict
from gradbox.protocol import StepView
from gradbox_service.database.conditional_commands import Beside, ConditionalCommands, Outdated
from gradbox_service.runs.record import RunRecord, SaveRecord

RUNS: Final = "gradbox:runs"
BYTES: Final = "gradbox:run-bytes"
REMEMBERED_S: Final = 7 * 24 * 3600


class Runs:
    """The runs of a box. Every method is safe to call from several processes at once."""

    def __init__(self, connection: redis.Redis) -> None:
        self._redis = connection
        self._creating = ConditionalCommands(connection)
        self._commands = ConditionalCommands(connection, over_bound=True)

    # --- runs ------------------------------------------------------------------------------------

    def create(self, run: RunRecord, *, idempotency_key: str | None, digest: str) -> RunRecord:
        """Store a run, or return the one that its owner made before under the same key.

        Args:
            digest: of what was posted.

        Raises:
            IdempotencyConflict: the key was used with another run.
        """
        while True:
            where: dict[str, bytes | str] = {run_key(run.id): ""}
            pipe = self._redis.pipeline()
            if idempotency_key is not None:
                if earlier := self.posted(run.owner, idempotency_key, digest=digest):
                    return earlier
                key = _posted_key(run.owner, idempotency_key)
                where[key] = cast("bytes | None", self._redis.get(key)) or b""
                pipe.set(key, f"{run.id} {digest}", ex=REMEMBERED_S)
            pipe.set(run_key(run.id), run.to_json())
            for index in (RUNS, f"{RUNS}:{run.owner}"):
                pipe.zadd(index, {run.id: run.created_s})
            if self._creating.run(pipe, where=where):
                return run
            if found := self.get(run.id):  # the answer to this very script was lost
                return found

    def posted(self, owner: str, idempotency_key: str, *, digest: str) -> RunRecord | None:
        """Return the run that an owner made under a key, if there is one.

        Raises:
            IdempotencyConflict: the key was used with another run.
        """
        found = cast("bytes | None", self._redis.get(_posted_key(owner, idempotency_key)))
        if found is None:
            return None
        run_id, _, earlier = found.decode().partition(" ")
        run = self.get(run_id)
        if run is not None and earlier != digest:
            raise IdempotencyConflict(
                f"the Idempotency-Key {idempotency_key!r} came before with another run; send a new "
                f"key with a new run"
            )
        return run

    def get(self, run_id: str) -> RunRecord | None:
        """Return a run's record, or None if there is no such run."""
        return self._read(run_id)[0]

    def owned(self, owner: str | None, *, after: tuple[float, str] | None) -> Iterator[RunRecord]:
        """Give an owner's runs, newest first, or everybody's.

        Args:
            after: when one was created, and its id: those behind it alone.
        """
        index = RUNS if owner is None else f"{RUNS}:{owner}"
        until: Any = "+inf" if after is None else after[0]
        ids = cast("list[bytes]", self._redis.zrevrangebyscore(index, until, "-inf"))
        for run in self.many([run_id.decode() for run_id in ids]):
            if after is None or (run.created_s, run.id) < after:
                yield run

    def all(self) -> Sequence[RunRecord]:
        """Return all runs, oldest first."""
        ids = cast("list[bytes]", self._redis.zrange(RUNS, 0, -1))
        return self.many([run_id.decode() for run_id in ids])

    def many(self, run_ids: Sequence[str]) -> Sequence[RunRecord]:
        """Return the records that there are of these runs."""
        if not run_ids:
            return []
        texts = cast("list[bytes | None]", self._redis.mget([run_key(i) for i in run_ids]))
        return [RunRecord.from_json(text) for text in texts if text is not None]

    def forget(self, run: RunRecord) -> None:
        """Remove all that is known of a run; its files are the caller's to remove.

        Raises:
            Outdated: it has changed.
        """
        now, text = self._read(run.id)
        if now != run:
            raise Outdated
        pipe = self._redis.pipeline()
        pipe.delete(run_key(run.id), steps_key(run.id))
        for index in (RUNS, f"{RUNS}:{run.owner}"):
            pipe.zrem(index, run.id)
        pipe.hincrby(BYTES, run.owner, -run.state_bytes)
        if not self._commands.run(pipe, where={run_key(run.id): text}):
            raise Outdated

    # --- steps -----------------------------------------------------------------------------------

    def posting(self, run: RunRecord, *, job: str, digest: str) -> Beside:
        """Return what is written with the job of a run's next step.

        Raises:
            Outdated: the run has changed.
        """
        now, text = self._read(run.id)
        if now != run:
            raise Outdated
        return self._beside(run, run.posted(job=job, digest=digest), where=text)

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

        return self._beside(run, after, write, where=text)

    def written(self, run_id: str, steps: Collection[int], *, size_bytes: int) -> None:
        """Note of which steps there are state files, and what they take together."""
        while True:
            run, text = self._read(run_id)
            if run is None:
                return
            after = run.written(steps, size_bytes=size_bytes)
            beside = self._beside(run, after, where=text)
            pipe = self._redis.pipeline()
            beside.write(pipe)
            if after == run or self._commands.run(pipe, where=beside.where):
                return

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
        names = cast("set[bytes]", self._redis.smembers(_saves_key(owner)))
        found = (self.save(owner, name.decode()) for name in sorted(names))
        return [save for save in found if save is not None]

    def save(self, owner: str, name: str) -> SaveRecord | None:
        """Return what an owner saved under a name."""
        text = cast("bytes | None", self._redis.get(_save_key(owner, name)))
        return None if text is None else SaveRecord.from_json(text)

    def jobs_of_saves(self) -> Sequence[str]:
        """Return the jobs that wrote saved states, or are about to."""
        return [
            save.job for owner in {run.owner for run in self.all()} for save in self.saves(owner)
        ]

    def saving(self, save: SaveRecord, *, before: SaveRecord | None) -> Beside:
        """Return what is written with the job that saves a state, in place of an earlier one.

        Raises:
            Outdated: that has changed.
        """

        def write(pipe: Pipeline) -> None:
            pipe.set(_save_key(save.owner, save.name), save.to_json())
            pipe.sadd(_saves_key(save.owner), save.name)

        where = self._in_place_of(before, owner=save.owner, name=save.name)
        return Beside(write, where)

    def saved(self, run_id: str, name: str, *, job: str, size_bytes: int) -> Beside:
        """Return what is written with the end of the job that saved a state.

        Raises:
            RunConflict: the name is not for that job any more.
        """
        run = self.get(run_id)
        save = None if run is None else self.save(run.owner, name)
        if run is None or save is None or save.job != job:
            raise RunConflict(f"expected job {job} to save {name!r} of run {run_id}, which is gone")
        after = replace(save, size_bytes=size_bytes)

        def write(pipe: Pipeline) -> None:
            pipe.set(_save_key(run.owner, name), after.to_json())
            pipe.hincrby(BYTES, run.owner, size_bytes - (save.size_bytes or 0))

        return Beside(write, self._in_place_of(save, owner=run.owner, name=name))

    def share(self, save: SaveRecord, *, shared: bool) -> None:
        """Note whether everybody may read a save.

        Raises:
            Outdated: it has changed.
        """
        beside = self.saving(replace(save, shared=shared), before=save)
        pipe = self._redis.pipeline()
        beside.write(pipe)
        if not self._commands.run(pipe, where=beside.where):
            raise Outdated

    def unsave(self, save: SaveRecord) -> None:
        """Forget a save; its file is the caller's to remove.

        Raises:
            Outdated: it has changed.
        """
        where = self._in_place_of(save, owner=save.owner, name=save.name)
        pipe = self._redis.pipeline()
        pipe.delete(_save_key(save.owner, save.name))
        pipe.srem(_saves_key(save.owner), save.name)
        pipe.hincrby(BYTES, save.owner, -(save.size_bytes or 0))
        if not self._commands.run(pipe, where=where):
            raise Outdated

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

    # --- sums ------------------------------------------------------------------------------------

    def bytes_of(self, owner: str) -> int:
        """Return what an owner's states take on disk."""
        return int(cast("bytes | None", self._redis.hget(BYTES, owner)) or 0)

    def totals(self) -> Mapping[str, int]:
        """Return `bytes_of` for every owner who has any."""
        found = cast("dict[bytes, bytes]", self._redis.hgetall(BYTES))
        return {owner.decode(): int(size) for owner, size in found.items() if int(size)}

    def _read(self, run_id: str) -> tuple[RunRecord | None, bytes]:
        text = cast("bytes | None", self._redis.get(run_key(run_id)))
        return (None if text is None else RunRecord.from_json(text)), text or b""

    def _steps(self, run_id: str, numbers: Sequence[int]) -> Iterator[tuple[StepView, str]]:
        if not numbers:
            return
        lines = self._redis.hmget(steps_key(run_id), [str(number) for number in numbers])
        for line in cast("list[bytes | None]", lines):
            if line is not None:
                yield _read_step(line)

    def _beside(
        self,
        before: RunRecord,
        after: RunRecord,
        more: Callable[[Pipeline], None] = lambda _: None,
        *,
        where: bytes,
    ) -> Beside:
        """Return the write of a run's record, in place of the one that was read as `where`."""

        def write(pipe: Pipeline) -> None:
            pipe.set(run_key(after.id), after.to_json())
            if after.state_bytes != before.state_bytes:
                pipe.hincrby(BYTES, after.owner, after.state_bytes - before.state_bytes)
            more(pipe)

        return Beside(write, {run_key(before.id): where})

    def _in_place_of(
        self, save: SaveRecord | None, *, owner: str, name: str
    ) -> dict[str, bytes | str]:
        """Return the condition that a save is as it was read.

        Raises:
            Outdated: it is not.
        """
        key = _save_key(owner, name)
        text = cast("bytes | None", self._redis.get(key))
        if (None if text is None else SaveRecord.from_json(text)) != save:
            raise Outdated
        return {key: text or b""}


def _kept_numbers(run: RunRecord) -> Sequence[int]:
    return range(run.kept_after + 1, run.num_steps + 1)


def _read_step(line: bytes) -> tuple[StepView, str]:
    digest, _, view = line.partition(b" ")
    return StepView.model_validate_json(view), digest.decode()


def run_key(run_id: str) -> str:
    return f"gradbox:run:{run_id}"


def steps_key(run_id: str) -> str:
    return f"gradbox:run-steps:{run_id}"


def _save_key(owner: str, name: str) -> str:
    return f"gradbox:save:{owner}:{name}"


def _saves_key(owner: str) -> str:
    return f"gradbox:saves:{owner}"


def _weights_key(caller: str, run_id: str, step: int) -> str:
    return f"gradbox:run-weights:{run_id}:{step}:{caller}"


def _posted_key(owner: str, idempotency_key: str) -> str:
    digest = hashlib.sha256(idempotency_key.encode()).hexdigest()
    return f"gradbox:run-key:{owner}:{digest}"
