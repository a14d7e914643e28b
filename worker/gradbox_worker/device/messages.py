"""The messages between a worker and its device process: JSON over a pipe, one message a frame.

    template → worker   forked | unforked, where there is a template
    worker → device     begin; then run, stop
    device → worker     building*, then ready | unready; then, for each run, progress*, phase*,
                        memory* and one of finished, failed, stopped, lost

`multiprocessing.connection.Connection` frames the bytes; its `send` and `recv` would pickle and are
never used.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from gradbox.protocol import DeviceMemory, ModelView, Problem, ResultView
from gradbox_worker.work import Work


class Frame(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Forked(Frame):
    """The device process at the pipe's other end has been forked, and is the worker's child."""

    kind: Literal["forked"] = "forked"
    pid: int


class Unforked(Frame):
    """The template does not fork, and never will."""

    kind: Literal["unforked"] = "unforked"
    reason: str


class Begin(Frame):
    """The worker's first message.

    `known` are the versions of the models that an earlier device process described from the same
    models file, `unusable` the reasons why others cannot be built. None of these is built before a
    job needs it. `reloads` is how many reloads of the models the box's owner had asked for.
    """

    kind: Literal["begin"] = "begin"
    known: dict[str, str]
    unusable: dict[str, str] = {}
    reloads: int = 0


class Run(Frame):
    kind: Literal["run"] = "run"
    work: Work


class Stop(Frame):
    """Stop this attempt before its next shard; if another one runs, the message came too late."""

    kind: Literal["stop"] = "stop"
    job_id: str
    attempt: int


class Building(Frame):
    """A model is about to be built and tried: what ends the process now, that model did."""

    kind: Literal["building"] = "building"
    model: str


class DeviceReady(Frame):
    """Jobs can run, on the device that `placement` names.

    `models` describes the models that the worker did not know, also those that cannot be built.
    `hardware` is what the device calls itself.
    """

    kind: Literal["ready"] = "ready"
    placement: str
    models: list[ModelView]
    hardware: str = ""
    memory: DeviceMemory | None = None


class DeviceUnready(Frame):
    """The device or the models file cannot be used; the process ends."""

    kind: Literal["unready"] = "unready"
    problem: Problem


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
    """The attempt is lost: what it ran on ended or is of no use, and not the process that says so.

    `fault` says what the job's own code may have brought about, see `work.Died`. `leaving`: the
    process ends after this, so that another one finds what has taken the place of what ended;
    where the job had not begun, that one runs it.
    """

    kind: Literal["lost"] = "lost"
    reason: str
    fault: str | None = None
    leaving: bool = False
    begun: bool = True


ToDevice = Begin | Run | Stop
FromDevice = (
    Forked
    | Unforked
    | Building
    | DeviceReady
    | DeviceUnready
    | ProgressMade
    | PhaseTimed
    | MemoryMeasured
    | RunFinished
    | RunFailed
    | RunStopped
    | RunLost
)

TO_DEVICE: Final[TypeAdapter[ToDevice]] = TypeAdapter(
    Annotated[ToDevice, Field(discriminator="kind")]
)
FROM_DEVICE: Final[TypeAdapter[FromDevice]] = TypeAdapter(
    Annotated[FromDevice, Field(discriminator="kind")]
)


def send(connection: Connection, message: ToDevice | FromDevice) -> None:
    """Send one message.

    Raises:
        OSError: the other side is gone.
    """
    connection.send_bytes(message.model_dump_json().encode())


def receive_order(connection: Connection) -> ToDevice:
    """Wait for the worker's next message.

    Raises:
        EOFError, OSError: the worker is gone.
    """
    return TO_DEVICE.validate_json(connection.recv_bytes())


def receive_answer(connection: Connection) -> FromDevice:
    """Wait for the device's next message.

    Raises:
        EOFError, OSError: the device process is gone.
    """
    return FROM_DEVICE.validate_json(connection.recv_bytes())
