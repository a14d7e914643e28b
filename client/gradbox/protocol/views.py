"""What the service answers about jobs and models."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from gradbox.protocol.problem import Problem
from gradbox.protocol.spec_fields import JobId


class JobState(StrEnum):
    """`queued → running → done | failed | cancelled`; a lost attempt goes back to `queued`."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


class View(BaseModel):
    """Frozen; unknown fields are kept out of the way, so that a newer service can add some."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class ProgressView(View):
    """How far a running job is: shards of `phase`, or samples where that is "samples"."""

    phase: str
    done: int
    total: int
    seconds_left: float | None = None


class ResultView(View):
    """The result file of a job that is done."""

    size_bytes: int
    sha256: str


class JobView(View):
    """One job. Times are seconds since 1970, UTC.

    Of a queued job, `queue_position` is 1 for the next one, `waiting_for` says how many jobs of
    which owners run or come before it (the owners with most of them), and `seconds_left` guesses
    how long it will wait. They are there within a second of asking for the first time.
    `hold` says why no waiting job is handed to a worker: the box's owner paused or drains it.
    """

    id: JobId
    state: JobState
    computation: str
    model: str
    name: str = ""
    owner: str
    priority: int = 0
    created_s: float
    started_s: float | None = None
    finished_s: float | None = None
    attempts: int = 0
    queue_position: int | None = None
    waiting_for: dict[str, int] | None = None
    seconds_left: float | None = None
    hold: str | None = None
    progress: ProgressView | None = None
    cancel_requested: bool = False
    worker: str | None = None
    error: Problem | None = None
    result: ResultView | None = None


class ParameterView(View):
    name: str
    shape: list[int]
    dtype: str


class MethodView(View):
    """An entry point that the registry allows, with its arguments in order."""

    arguments: list[str]
    required: list[str]
    any_keyword: bool = False
    any_positional: bool = False


class ModelView(View):
    """A registered model. `version` is the SHA-256 over its architecture and weights."""

    name: str
    version: str
    num_parameters: int
    parameters: list[ParameterView]
    buffers: list[ParameterView] = []
    methods: dict[str, MethodView]
