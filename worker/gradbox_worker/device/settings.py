"""What a device process is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

DEVICE_MODULE: Final = "gradbox_worker.turns.main"


@dataclass(frozen=True)
class DeviceSettings:
    """A device, and how jobs run on it."""

    models_file: Path
    data: Path  # the folder with the blobs
    device: str = "auto"  # auto | cpu | cuda:N | mps
    num_gpus: int = 1  # from cuda:N on; more than one in a cluster alone
    model_memory_bytes: int | None = None  # of weights kept on the device; None: half of it
    run_memory_bytes: int | None = None  # of states of runs; None: a quarter of the device
    result_memory_bytes: int | None = None  # of a result on its way to disk; None: an eighth
    job_memory_bytes: int | None = None  # what a job may allocate; None: see MemoryLimit
    checkpoint_after_s: float | None = None  # of a job's run; None: see checkpoints.Pace
    log: Path | None = None  # of what it prints; None: the worker's standard error
    build_timeout_s: float = 600.0  # for a model to be built and tried
    beside: bool = False  # whether another process has the device, and its models
    redis_url: str | None = None  # where a device of a cluster reads of runs; None: it has none


@dataclass(frozen=True)
class TurnSettings:
    """The worker for which a device process takes turns."""

    worker: str  # its name
    redis_url: str
    lease_s: float  # of an attempt, when it begins
    disk_reserve_bytes: int | None = None  # see `gradbox_service.store.Room`


@dataclass(frozen=True)
class Start:
    """What one device process is started with.

    Attributes:
        mark: what its entry in Redis, and all that it starts, is known by.
        parent: the worker's process.
        known: versions of the models that an earlier process described from the same models file;
            they are not built before a job needs them.
        unusable: why others cannot be built, likewise.
        reloads: how many reloads of the models the box's owner had asked for.
        trial: whether it first tries all models beside the device that serves meanwhile.
        step_fd: the file of its `LastStep`.
    """

    settings: DeviceSettings
    turns: TurnSettings
    mark: str
    parent: int
    step_fd: int
    known: Mapping[str, str] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)
    reloads: int = 0
    trial: bool = False


START: Final = TypeAdapter(Start)
