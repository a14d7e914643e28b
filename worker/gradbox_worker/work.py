"""What a device is asked to do, how it is watched meanwhile, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gradbox.errors import JobTimedOut
from gradbox.protocol import CurvatureView, EstimateView, JobSpec, Problem, ResultView

if TYPE_CHECKING:  # a worker's parent process loads no NumPy
    from gradbox.results.result_files import HeldTensors


@dataclass(frozen=True)
class StoreAsRead:
    """What a job reads of a store: its parts in their order, and what queries are multiplied by."""

    parts: Sequence[Path]
    columns: Mapping[str, int]  # numbers of a row by parameter
    curvature: tuple[Path, CurvatureView] | None = None


@dataclass(frozen=True)
class Work:
    """One attempt at one job."""

    job_id: str
    attempt: int  # 1 for the first
    model: str  # as registered
    model_version: str  # which the box had when it accepted the job
    spec: JobSpec
    spec_digest: str  # for its receipt
    result_path: Path  # written whole or not at all
    queued_s: float  # how long the job waited, for its receipt
    earlier_result: Path | None = None  # of the job it goes on from
    store: StoreAsRead | None = None  # that it reads
    disk_reserve_bytes: int | None = None  # see `gradbox_service.store.Room`
    timed: bool = False  # whether the supervision hears of its phases
    not_split: str = ""  # why a job that asked for several devices runs on one
    # Whether inputs and results are in this process: then no file is read or written, and the paths
    # only tell one job's result from another's.
    in_memory: bool = False
    earlier_tensors: HeldTensors | None = None  # what `earlier_result` would hold, in memory
    estimate: EstimateView | None = None  # what was kept of its like, for its receipt
    ran_out_bytes: int | None = None  # what an estimate needed when memory ran out, at least

    @property
    def checkpoints(self) -> Path:
        """The folder that `ResultStore.checkpoints` names, beside that of the results."""
        return self.result_path.parent.with_name("checkpoints")


@dataclass(frozen=True)
class StepMade:
    """A step of a run, as its record takes it.

    `loss` is None where the laptop had it.
    """

    run: str
    number: int
    loss: float | None
    grad_norm: float
    lr: list[float]


@dataclass(frozen=True)
class StoredRows:
    """Rows for a store, which the result file has; `loss` is the digest of theirs."""

    store: str
    loss: str
    columns: Mapping[str, int]


@dataclass(frozen=True)
class StoredCurvature:
    """Curvature for a store, which the result file has; its size is not known yet."""

    store: str
    view: CurvatureView


@dataclass(frozen=True)
class Finished:
    """The result file stands at `Work.result_path`, or here: one that is to be in Redis.

    Of a job in memory there is no file, and `tensors` are its result.

    Of a step, `step` is what its run's record takes; of a state that was saved, `saved_bytes` is
    what its file takes; of what is for a store, `stored` is what its record takes. `estimate` is
    what a job has found that was to estimate one.
    """

    result: ResultView
    content: bytes | None = None
    step: StepMade | None = None
    saved_bytes: int | None = None
    tensors: HeldTensors | None = None
    stored: StoredRows | StoredCurvature | None = None
    estimate: EstimateView | None = None


@dataclass(frozen=True)
class Failed:
    """The job cannot be done as it is; another attempt would end the same way.

    Attributes:
        leaving: whether the device's state is spoilt, so that its process is to end.
    """

    problem: Problem
    leaving: bool = False


@dataclass(frozen=True)
class Stopped:
    """It ended because it was to stop.

    Attributes:
        leaving: whether the device stopped it by itself before it had begun, and its process is to
            end: then the job goes back to the queue as it was.
    """

    leaving: bool = False


@dataclass(frozen=True)
class Died:
    """The process that computed it ended.

    Attributes:
        reason: says how, as a clause: "it was killed by …".
        fault: what the job's own code ran into, and at which shard; None if the process was ended
            from outside. Another attempt that ends by the same fault has met what will repeat.
        out_of_memory: whether the kernel ended it for lack of memory.
        leaving: whether the process that says so is to end, too.
    """

    reason: str
    fault: str | None = None
    out_of_memory: bool = False
    leaving: bool = False


Outcome = Finished | Failed | Stopped | Died


class Supervision(Protocol):
    """Who watches a running job."""

    def stop_requested(self) -> bool:
        """Return whether the job is to stop; asked before each shard."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """Hear how far the job is: `done` of `total` shards of `phase`."""

    def phase_ended(self, phase: str, *, began_s: float, ended_s: float) -> None:
        """Hear of a phase of a job that is `timed`, in seconds since 1970."""


class Device(Protocol):
    """What runs one job at a time, with models that stay loaded between jobs."""

    @property
    def models(self) -> Mapping[str, str]:
        """The versions of the models that it offers, by name."""

    def run(self, work: Work, supervision: Supervision) -> Outcome:
        """Compute a job to its end, or until it is to stop."""

    def rest(self) -> float | None:
        """Free what has waited for a job for too long; called between jobs.

        Returns:
            In how many seconds to call again, if no job comes; None: there is no need.
        """

    def close(self) -> None:
        """Write what another process is to go on from; called once, after the last job."""


def out_of_time(timeout_s: float) -> JobTimedOut:
    """Return the error of a job that ran for too long."""
    return JobTimedOut(
        f"expected the job to end within its timeout_s of {timeout_s:g} s, but it still ran; "
        f"submit it with a larger timeout_s, or with fewer or shorter shards"
    )
