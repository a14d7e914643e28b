"""What the service answers about jobs, models and built-in losses.

A job and its small result may come as one body, `JOB_AND_RESULT`:

    8 bytes     the length of the JSON, little-endian
    the JSON    the job, as `GET /v1/jobs/{id}` gives it
    the rest    the result file, whose size and digest the JSON states
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from pydantic import BaseModel, ConfigDict

from gradbox import html
from gradbox.protocol.problem import Problem
from gradbox.protocol.spec_fields import JobId

PROGRAM: Final = """\
import torch

from gradbox import GradClient, Gradient


def loss(z):
    return z.square().mean()


shard = {{
{inputs}
}}
with GradClient() as client:
    job = client.submit(
        Gradient(
{arguments}
        )
    )
    result = job.result()
print(f"loss {{result.loss:.6g}}, gradients of {{len(result.grads)}} parameters")
"""


class ExampleInput(BaseModel):
    """A tensor that a model takes. Whole numbers are drawn from 0 up to, not including, `high`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    shape: list[int]
    dtype: str
    high: int | None = None


class ExampleView(BaseModel):
    """One call that the worker has tried: an entry point, its inputs, and the output that is z."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    method: str
    inputs: list[ExampleInput]
    output: str | int | None = None
    output_shape: list[int]


def example_code(model: str, example: ExampleView | None, *, needed: Sequence[str]) -> str:
    """Return a program that runs a job on a model.

    Args:
        needed: the arguments that the program leaves to the reader where there is no example.
    """
    arguments = [f"model={model!r}", "inputs=[shard, shard]"]
    if example is not None:
        inputs = [f"    {given.name!r}: {_tensor(given)}," for given in example.inputs]
        if example.method != "forward":
            arguments.append(f"method={example.method!r}")
        if example.output is not None:
            arguments.append(f"output={example.output!r}")
    else:
        inputs = [f"    {name!r}: ...,  # a tensor" for name in needed]
        inputs.insert(0, "    # the worker found no inputs that this model takes: write yours here")
    arguments.append("loss=loss")
    return PROGRAM.format(
        inputs="\n".join(inputs).replace("'", '"'),
        arguments="\n".join(f"            {given}," for given in arguments).replace("'", '"'),
    )


def _tensor(given: ExampleInput) -> str:
    shape = ", ".join(map(str, given.shape))
    dtype = "" if given.dtype == "float32" else f", dtype=torch.{given.dtype}"
    if given.high is None:
        return f"torch.randn({shape}{dtype})"
    if given.high == 2:  # a mask that masks nothing
        return f"torch.ones({shape}{dtype})"
    long = "" if given.dtype == "int64" else dtype
    return f"torch.randint({given.high}, {tuple(given.shape)}{long})"


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

    def stage(self, attempt: int) -> tuple[int, int]:
        """Return what grows with every change of a job's state: the attempt, and how far it is."""
        if self is JobState.RUNNING:
            return attempt, 0
        return attempt, 2 if self.final else 1


class View(BaseModel):
    """Frozen; unknown fields are kept out of the way, so that a newer service can add some.

    A notebook shows what it says, field by field.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    def _repr_html_(self) -> str:
        kind = type(self).__name__.removesuffix("View")
        return html.described(self, title=f"{kind} {getattr(self, 'name', '')}".rstrip())


class ProgressView(View):
    """How far a running job is: shards of `phase`; or what that says, "samples" or "products"."""

    phase: str
    done: int
    total: int
    seconds_left: float | None = None


class ResultView(View):
    """The result file of a job that is done. Without a box there is none, and no digest of one."""

    size_bytes: int
    sha256: str


class EstimateView(View):
    """What a job takes, as it was measured on a few of its shards.

    Attributes:
        fits: whether the job fits the device that was asked, with one shard's graph at a time.
        peak_bytes: memory at the job's peak with one shard's graph at a time (`retain=0`). On a CPU
            it is the process's, on a GPU the allocator's, as `manifest.peak_memory_bytes` of a
            result. Where memory ran out while it was measured, it is this or more.
        peak_retained_bytes: the same with the graphs that the job's `retain` would keep.
        before_bytes: what of it was taken before the job began: models, and a CPU's process.
        most_bytes: what the device has for it.
        device: what was asked.
        device_bytes: all of its memory.
        seconds: on the device, without the wait, and without loading the model; None where memory
            ran out.
        shards_retained: how many graphs would be kept; None where a computation keeps none.
        upload_bytes: the tensors that the job names. By now they are on the box.
        result_bytes: the tensors of its result.
        advice: what to change where it does not fit.
    """

    fits: bool
    peak_bytes: int
    peak_retained_bytes: int
    before_bytes: int
    most_bytes: int
    device: str
    device_bytes: int
    seconds: float | None = None
    shards_retained: int | None = None
    upload_bytes: int = 0
    result_bytes: int = 0
    advice: str = ""


class JobView(View):
    """One job. Times are seconds since 1970, UTC. `progress` is complete where it is done.

    Of a queued job, `queue_position` is 1 for the next one, `waiting_for` says how many jobs of
    which owners run or come before it (the owners with most of them), and `seconds_left` guesses
    how long it will wait. They are there within a second of asking for the first time.
    `hold` says why no waiting job is handed to a worker: the box's owner paused or drains it.
    `traceparent` is the parent of the job's spans, see `gradbox.spans`.
    `estimate` is what the job has found that is to estimate one, and of another job the estimate
    that was kept of its like when it was accepted.
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
    traceparent: str | None = None
    estimate: EstimateView | None = None

    def waits_for(self) -> str:
        """Say how many jobs of whom run or come before this one: "2 of ann, 1 of bob"."""
        return ", ".join(f"{n} of {owner}" for owner, n in (self.waiting_for or {}).items())

    def _repr_html_(self) -> str:
        bar = ""
        if self.progress is not None:
            done, total = self.progress.done, self.progress.total
            bar = html.meter(done, total, label=f"{self.progress.phase} {done} of {total}")
        return html.described(self, title=f"Job {self.id}: {self.state.value}") + bar


class JobList(View):
    """Jobs, newest first. `next` is the cursor of the page that follows; None on the last one."""

    jobs: list[JobView]
    next: str | None = None


class BlobView(View):
    """A blob. `used_s` is when it was last sent, asked for or needed, in seconds since 1970."""

    digest: str
    size_bytes: int
    used_s: float


class BlobList(View):
    """Blobs by digest. `next` is the cursor of the page that follows; None on the last one."""

    blobs: list[BlobView]
    next: str | None = None


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
    """A registered model. `version` is the SHA-256 over its architecture and weights.

    Of one that is not `usable`, `reason` says why, and there is nothing else to say of it: its
    version is empty. `size_bytes` are those of its parameters and buffers. `tied` has the further
    names of tensors that the model holds under several, each with the one that they are listed by.
    """

    name: str
    version: str = ""
    usable: bool = True
    reason: str = ""
    num_parameters: int = 0
    size_bytes: int = 0
    parameters: list[ParameterView] = []
    buffers: list[ParameterView] = []
    tied: dict[str, str] = {}
    methods: dict[str, MethodView] = {}
    example: ExampleView | None = None

    def parameter_names(self) -> list[str]:
        """Return the names of the parameters; of a tied one, all."""
        listed = [view.name for view in self.parameters]
        return listed + [name for name, first in self.tied.items() if first in listed]

    def example_code(self) -> str:
        """Return a Python program that runs a job on this model, with inputs that it takes.

        Where the worker found no inputs by itself, the program has a gap that says so.
        """
        first = next(iter(self.methods.values()), None)
        needed = [] if first is None else first.required or first.arguments[:1]
        return example_code(self.name, self.example, needed=needed)


class ModelList(View):
    """All models of a box.

    `reloading` names the workers that have not read the models file again since the box's owner
    asked for it; `errors` says by worker why one could not: it offers what it offered before.
    """

    models: list[ModelView]
    reloading: list[str] = []
    errors: dict[str, str] = {}


JOB_AND_RESULT: Final = "application/vnd.gradbox.job-and-result"
LENGTH_BYTES: Final = 8


def joined_with_result(view: JobView, result: bytes) -> bytes:
    """Return the body."""
    text = view.model_dump_json().encode()
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + result


def split_result(body: bytes) -> tuple[JobView, memoryview]:
    """Return the job and the bytes of its result, which are not verified here.

    Raises:
        ValueError: the body has another form.
    """
    end = LENGTH_BYTES + int.from_bytes(body[:LENGTH_BYTES], "little")
    if len(body) < end:
        raise ValueError(f"expected {end} bytes or more, got {len(body)}")
    return JobView.model_validate_json(body[LENGTH_BYTES:end]), memoryview(body)[end:]
