"""What passes between the head and its devices; none of it needs torch, which the head lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradbox.protocol import DeviceMemory, ModelView
from gradbox_worker.device.entry import DeviceEntry


@dataclass(frozen=True)
class Described:
    """What a device is once its models were built.

    Attributes:
        views: of the models that it has described, also of those that cannot be built.
        software: what must be the same on all devices.
        sees_files: whether it sees the box's data folder.
    """

    entry: DeviceEntry
    views: Sequence[ModelView]
    software: str
    sees_files: bool
    process: int


@dataclass(frozen=True)
class Helper:
    """A device that may run ranges of a job which another one leads.

    Attributes:
        actor: a handle of a `DeviceActor`, which is one process for its whole life.
        sees_files: whether it sees the box's data folder.
    """

    name: str
    actor: Any
    sees_files: bool


@dataclass(frozen=True)
class PhaseSpan:
    """A phase of a job that has ended, in seconds since 1970."""

    phase: str
    began_s: float
    ended_s: float


@dataclass(frozen=True)
class News:
    """What a device says of the job that runs on it.

    Attributes:
        step: the last one: the phase, how many shards are done, and of how many.
        memory: what is in its memory, if that was measured since the last news.
        phases: those that have ended since then, of a job that is timed.
        alone: whether it needs the devices no more that it has led.
    """

    step: tuple[str, int, int] | None = None
    memory: DeviceMemory | None = None
    phases: Sequence[PhaseSpan] = ()
    alone: bool = False
