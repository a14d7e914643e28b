"""The workers of a box: who lives, what each does, and the models they announce."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeVar, cast

import redis
from pydantic import BaseModel, ConfigDict

from gradbox.protocol import DeviceMemory, ModelBuild, ModelView, OperationView
from gradbox_service.database.conditional_commands import ConditionalCommands
from gradbox_service.database.refusals import unless_refused
from gradbox_service.fleet.operation import OPERATION, read_operation
from gradbox_service.jobs import changes
from gradbox_service.jobs.turns import held_key

log = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)

WORKERS = "gradbox:workers"
MODELS = "gradbox:models"
# When each was described; one that nobody offers goes so long after, with another of its name.
DESCRIBED = "gradbox:models:described"
DESCRIBED_S = 30 * 24 * 3600.0
RELOADS = "gradbox:models:reloads"
# How old a look may be at which workers there are.
NAMES_S = 1.0
# Announcements remembered as they were parsed, by their bytes; a large model's takes 1 MB.
PARSED_KEPT = 32


class WorkerPresence(BaseModel):
    """What a worker says of itself every few seconds.

    `models` maps names to versions; it is empty until the device process has described them.
    `unusable` maps the names of models that cannot be built to the reason. `reloads` is how many
    reloads had been asked for when it last read its models file; `reload_error` says why it could
    not, and offers what it did before. `hardware` is what its device calls itself, `host` the name
    of its machine. `building` is the model that it builds, before it is ready or to be offered
    after a reload. That it is busy, and with which `job`, is not announced: `Fleet.workers` reads
    it where the device process notes it.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    host: str = ""
    device: str
    state: Literal["starting", "idle", "busy"]
    models: Mapping[str, str] = {}
    unusable: Mapping[str, str] = {}
    reloads: int = 0
    reload_error: str = ""
    job: str | None = None
    started_s: float = 0.0
    hardware: str = ""
    memory: DeviceMemory | None = None
    building: ModelBuild | None = None

    def busy_with(self, held: bytes) -> WorkerPresence:
        """Return it with the job that its device has in hand, see `Turns.held`."""
        job = held.decode().rpartition(" ")[0]
        state = "busy" if self.state == "idle" else self.state
        return self.model_copy(update={"state": state, "job": job})


@dataclass(frozen=True)
class Standing:
    """What a job that is posted meets: the box's mode, and the workers."""

    operation: OperationView
    workers: Sequence[WorkerPresence]


class Fleet:
    """What workers announce and the service reads.

    In Redis, one key with an expiry a worker, and one hash of descriptions.
    """

    def __init__(self, connection: redis.Redis) -> None:
        self._redis = connection
        self._commands = ConditionalCommands(connection, over_bound=True)
        self._names: list[str] = []  # of the workers that lived at the last look
        self._names_read_s = -math.inf
        self._read: dict[str, tuple[float, ModelView]] = {}  # when each description was read

    def announce(self, presence: WorkerPresence, *, ttl_s: float) -> None:
        """Say that a worker lives, for the next `ttl_s` seconds."""
        pipe = self._redis.pipeline()
        key = _presence_key(presence.name)
        pipe.set(key, presence.model_dump_json(), px=max(1, int(ttl_s * 1000)))
        pipe.sadd(WORKERS, presence.name)
        changes.append_change(pipe, "", "worker")
        self._commands.run(pipe, where={})

    def retire(self, name: str) -> None:
        """Say that a worker has stopped."""
        pipe = self._redis.pipeline()
        pipe.delete(_presence_key(name))
        pipe.srem(WORKERS, name)
        changes.append_change(pipe, "", "worker")
        self._commands.run(pipe, where={})

    def describe(self, models: Iterable[ModelView]) -> None:
        """Publish what models look like; presences refer to them by name and version."""
        views = {f"{view.name}@{view.version}": view for view in models}
        pipe = self._redis.pipeline()
        for version in self._superseded({view.name for view in views.values()}):
            pipe.hdel(MODELS, version)
            pipe.zrem(DESCRIBED, version)
        for version, view in views.items():
            pipe.hset(MODELS, version, view.model_dump_json())
            pipe.zadd(DESCRIBED, {version: time.time()})
        self._commands.run(pipe, where={})

    def _superseded(self, names: Collection[str]) -> set[str]:
        """Return the versions of these models that were described long ago and nobody offers."""
        before_s = time.time() - DESCRIBED_S
        old = cast("list[bytes]", self._redis.zrangebyscore(DESCRIBED, 0, before_s))
        offered = {f"{n}@{version}" for w in self.workers() for n, version in w.models.items()}
        found = {version.decode() for version in old} - offered
        return {version for version in found if version.partition("@")[0] in names}

    def ask_for_reload(self) -> int:
        """Ask every worker to read its models file again; return how often that was asked."""
        return self._redis.incr(RELOADS)

    def reloads(self) -> int:
        """Return how often workers have been asked to read their models file again."""
        return int(cast("bytes | None", self._redis.get(RELOADS)) or 0)

    def standing(self) -> Standing:
        """Return what a job that is posted meets, in one round trip.

        A worker that is new counts within `NAMES_S`.
        """
        if not self._names or time.monotonic() - self._names_read_s > NAMES_S:
            self.workers()
        keys = [OPERATION, *(_presence_key(name) for name in self._names)]
        operation, *found = cast("list[bytes | None]", self._redis.mget(keys))
        return Standing(read_operation(operation), _all_parsed(found))

    def workers(self) -> Sequence[WorkerPresence]:
        """Return the live workers by name."""
        names = sorted(n.decode() for n in cast("set[bytes]", self._redis.smembers(WORKERS)))
        keys = [_presence_key(name) for name in names] + [held_key(name) for name in names]
        texts = cast("list[bytes | None]", self._redis.mget(keys)) if keys else []
        found, held = texts[: len(names)], texts[len(names) :]
        gone = [name for name, text in zip(names, found, strict=True) if text is None]
        if gone:
            with unless_refused():  # a later look forgets them
                self._redis.srem(WORKERS, *gone)
        self._names, self._names_read_s = [n for n in names if n not in gone], time.monotonic()
        return [
            worker.busy_with(job) if job else worker
            for text, job in zip(found, held, strict=True)
            if text is not None and (worker := _parsed(WorkerPresence, text)) is not None
        ]

    def model(self, name: str, *, version: str, within_s: float = 0.0) -> ModelView | None:
        """Return a description that was published, as it is or was within these seconds."""
        reference = f"{name}@{version}"
        read_s, view = self._read.get(reference, (-math.inf, None))
        if time.monotonic() - read_s > within_s:
            text = cast("bytes | None", self._redis.hget(MODELS, reference))
            view = None if text is None else _parsed(ModelView, text)
            if view is not None:
                self._read[reference] = (time.monotonic(), view)
        return view


def _presence_key(name: str) -> str:
    return f"gradbox:worker:{name}"


def _all_parsed(texts: Iterable[bytes | None]) -> list[WorkerPresence]:
    found = [_parsed(WorkerPresence, text) for text in texts if text is not None]
    return [worker for worker in found if worker is not None]


def _parsed(kind: type[T], text: bytes) -> T | None:
    """Return what was announced; None, with its bytes logged, for what cannot be read."""
    try:
        return cast(T, _validated(kind, text))
    except ValueError:
        log.error("an announcement that is no %s is left out: %r", kind.__name__, text[:2000])
        return None


@lru_cache(maxsize=PARSED_KEPT)
def _validated(kind: type[BaseModel], text: bytes) -> BaseModel:
    # Every posted job asks for its model, whose parameters take longer to parse than the job.
    return kind.model_validate_json(text)


def offered_versions(workers: Sequence[WorkerPresence]) -> dict[str, list[str]]:
    """Return the versions of every model that live workers offer, the most offered first."""
    counts: dict[str, Counter[str]] = {}
    for worker in workers:
        for name, version in worker.models.items():
            counts.setdefault(name, Counter())[version] += 1
    return {
        name: sorted(versions, key=lambda version: (-versions[version], version))
        for name, versions in sorted(counts.items())
    }


def unusable_models(workers: Sequence[WorkerPresence]) -> dict[str, str]:
    """Return the models that no live worker could build, with what one of them says of it."""
    offered = offered_versions(workers)
    reasons = {name: why for worker in workers for name, why in worker.unusable.items()}
    return {name: why for name, why in sorted(reasons.items()) if name not in offered}


def said_builds(workers: Iterable[WorkerPresence]) -> str:
    """Return which models are being built and for how long, as "builds the model …"; "" if none."""
    builds = {w.building.model: w.building.since_s for w in workers if w.building is not None}
    now_s = time.time()
    return ", ".join(
        f"builds the model {name!r} for {max(0.0, now_s - since_s):.0f} s"
        for name, since_s in sorted(builds.items())
    )


def may_be_run(model: str, version: str, *, by: Iterable[WorkerPresence]) -> bool:
    """Return whether one of these workers offers this version, or may once it has started."""
    return any(worker.models.get(model) == version or worker.state == "starting" for worker in by)
