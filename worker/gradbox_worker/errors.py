"""What ends a worker, each with a message for the box's owner.

    WorkerError
    ├── ModelsFileError      the models file, or a model that it names, cannot be used
    ├── NameTaken            another living worker has this name on the same data
    └── DeviceNotStarted     the device process ended, again and again, before it was ready

`gradbox worker` prints the message and exits with 2. A job that meets a ModelsFileError fails as
`UnknownModel`: see `exceptions_to_problems`.
"""

from __future__ import annotations


class WorkerError(RuntimeError):
    """The worker cannot go on; the message says why and names the fix."""


class ModelsFileError(WorkerError, ValueError):
    """The models file, or a model it names, is not usable; the message says where and the fix."""


class NameTaken(WorkerError):
    """Another living process holds the worker's name."""


class DeviceNotStarted(WorkerError):
    """The device process ended before it was ready; the message says why."""
