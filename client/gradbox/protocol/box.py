"""What the service answers about the whole box: devices, queue, models, usage, mode.

Everybody with a token sees whose job runs or waits, on which model, and how far it is, since they
wait for it. `id` and `name` of a job are for its owner and the box's owner alone.

The mode is what the box's owner said last:

    running     jobs are handed to workers, and new ones taken
    paused      jobs are taken and wait; what runs goes on
    draining    new jobs are refused, too; the box ends once nothing runs
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import StringConstraints

from gradbox.graphs.wire_form import WireForm
from gradbox.protocol.spec_fields import JobId
from gradbox.protocol.views import JobState, MethodView, ProgressView, View


class OperationMode(StrEnum):
    """See the module."""

    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"


class OperationView(View):
    """The mode that a box is in, since when (seconds since 1970, UTC), by whom and why."""

    mode: OperationMode = OperationMode.RUNNING
    reason: str = ""
    by: str = ""
    since_s: float | None = None

    @property
    def hold(self) -> str | None:
        """Why no job that waits is handed to a worker; None while jobs are."""
        return None if self.mode is OperationMode.RUNNING else str(self)

    def __str__(self) -> str:
        by = f" by {self.by}" if self.by and self.mode is not OperationMode.RUNNING else ""
        return f"{self.mode}{by}{f': {self.reason}' if self.reason else ''}"


class OperationOrder(WireForm, frozen=True):
    """What the box's owner puts to /v1/operation."""

    mode: OperationMode
    reason: Annotated[str, StringConstraints(max_length=200)] = ""


Period = Literal["day", "week", "month"]


class DeviceMemory(View):
    """What is in a device's memory, in bytes.

    `used_bytes` is the device process's: of a CPU its resident memory, of CUDA what the allocator
    gave out. `models` are the weights on the device by registered name, `job_bytes` what the
    running job added.
    """

    total_bytes: int
    used_bytes: int
    models: dict[str, int] = {}
    job_bytes: int = 0


class ModelBuild(View):
    """A model that is being built and tried, since `since_s` in seconds since 1970."""

    model: str
    since_s: float


class DeviceView(View):
    """A worker and its device.

    `job` is the key of the job it holds. `busy` are the last 60 minutes, oldest first, each with
    the percent of it in which a job ran; the last one is the minute that runs. `hardware` is what
    the device calls itself. CPUs of one `host` are one machine, and its memory is there once.
    `building` is a model that is built before jobs can name it.
    """

    worker: str
    host: str = ""
    device: str
    hardware: str = ""
    state: Literal["starting", "idle", "busy"]
    started_s: float
    job: str | None = None
    memory: DeviceMemory | None = None
    building: ModelBuild | None = None
    busy: list[int]
    busy_share: float


class BoxJob(View):
    """A job that runs or waits; `key` tells it from others without telling its id.

    `position` is its place in the queue, 1 for the next, and `begins_s` about when it begins, if
    that can be said. `id` and `name` are None where the job is somebody else's.
    """

    key: str
    owner: str
    computation: str
    model: str
    state: JobState
    created_s: float
    started_s: float | None = None
    position: int | None = None
    begins_s: float | None = None
    progress: ProgressView | None = None
    cancel_requested: bool = False
    attempts: int = 0
    worker: str | None = None
    id: JobId | None = None
    name: str | None = None


class BoxModel(View):
    """A registered model. `reason` says why it cannot be used, where it cannot.

    `workers` are those that offer it, `loaded` those that have it in their device's memory.
    `program` is Python that runs a job on it.
    """

    name: str
    version: str = ""
    num_parameters: int = 0
    methods: dict[str, MethodView] = {}
    usable: bool = True
    reason: str = ""
    workers: list[str] = []
    loaded: list[str] = []
    program: str = ""


class CallerView(View):
    """Who asks."""

    name: str
    admin: bool


class BoxView(View):
    """The box now: all jobs that run, the first hundred that wait, devices and models."""

    now_s: float
    gradbox: str
    you: CallerView
    operation: OperationView = OperationView()
    num_running: int
    num_queued: int
    jobs: list[BoxJob]
    devices: list[DeviceView]
    models: list[BoxModel]


class OwnerUsage(View):
    """What one owner used; `owner` is None for all others together.

    `kept_bytes` are what their blobs, results and states of runs take on the box now, whatever the
    span. The lists have one entry a bucket, oldest first; the last one is not over yet.
    """

    owner: str | None
    device_s: float
    result_bytes: int
    num_jobs: int
    kept_bytes: int = 0
    device_s_by_bucket: list[float]
    result_bytes_by_bucket: list[int]


class UsageView(View):
    """Use by owner over a span of time, from `begins_s` in buckets of `bucket_s` seconds.

    A device second is a second in which a worker held an attempt of the job, lost ones included.
    """

    span: Period
    begins_s: float
    bucket_s: float
    owners: list[OwnerUsage]
