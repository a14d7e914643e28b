"""The messages between a coordinator and a device that runs a whole job for it, as JSON.

    coordinator → device    run
    device → coordinator    progress*, phase*, memory* and one of finished, failed, stopped

A coordinator says `lost` itself, of a device that has ended.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from gradbox.protocol import DeviceMemory, Problem, ResultView
from gradbox_worker.work import Work


class Frame(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Run(Frame):
    kind: Literal["run"] = "run"
    work: Work


class ProgressMade(Frame):
    kind: Literal["progress"] = "progress"
    phase: str
    done: int
    total: int


class PhaseTimed(Frame):
    """A phase of a job that is `timed` has ended; in seconds since 1970."""

    kind: Literal["phase"] = "phase"
    phase: str
    began_s: float
    ended_s: float


class MemoryMeasured(Frame):
    """What is in the device's memory, now and then while a job runs and at its end."""

    kind: Literal["memory"] = "memory"
    memory: DeviceMemory


class RunFinished(Frame):
    kind: Literal["finished"] = "finished"
    result: ResultView


class RunFailed(Frame):
    """The job failed. `leaving`: the device's state is spoilt, so the process ends after this."""

    kind: Literal["failed"] = "failed"
    problem: Problem
    leaving: bool = False


class RunStopped(Frame):
    kind: Literal["stopped"] = "stopped"


class RunLost(Frame):
    """The attempt is lost: the device that it ran on ended.

    `fault` says what the job's own code may have brought about, see `work.Died`.
    """

    kind: Literal["lost"] = "lost"
    reason: str
    fault: str | None = None


FromDevice = (
    ProgressMade | PhaseTimed | MemoryMeasured | RunFinished | RunFailed | RunStopped | RunLost
)

FROM_DEVICE: Final[TypeAdapter[FromDevice]] = TypeAdapter(
    Annotated[FromDevice, Field(discriminator="kind")]
)
