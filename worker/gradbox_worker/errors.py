"""What ends a worker, each with a message for the box's owner.

    WorkerError
    ├── ModelsFileError      the models file, or a model that it names, cannot be used
    │   └── WeightsDoNotFit  a model needs more memory than is free
    ├── NameTaken            another living worker has this name on the same data
    └── DeviceNotStarted     there is no such device, or its process ended before it was ready

`gradbox worker` prints the message and exits with 2. A job that meets a ModelsFileError fails as
`UnknownModel`, one whose model does not fit as `OutOfMemory`: see `exceptions_to_problems`.
"""

from __future__ import annotations


class WorkerError(RuntimeError):
    """The worker cannot go on; the message says why and names the fix."""


class ModelsFileError(WorkerError, ValueError):
    """The models file, or a model it names, is not usable; the message says where and the fix."""


class WeightsDoNotFit(ModelsFileError):
    """The memory that is free does not hold a model's weights.

    Attributes:
        wanted_bytes: of the allocation that failed; 0 if the error does not say.
    """

    def __init__(self, message: str, *, wanted_bytes: int = 0) -> None:
        super().__init__(message)
        self.wanted_bytes = wanted_bytes


class NameTaken(WorkerError):
    """Another living process holds the worker's name."""


class DeviceNotStarted(WorkerError):
    """There is no such device, or its process ended before it was ready; the message says why."""


class JobStopped(Exception):
    """A device of a cluster was told to stop a job, or does not have it open."""
