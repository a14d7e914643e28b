"""Where jobs run: a warm process that keeps the models, or for tests this very process.

`work` says what a device is asked and answers, `messages` how that travels over the pipe,
`process` is the parent's side of it and `gradbox_worker.device.main` the child's; `inline` is the
twin that runs in the calling process. Only `inline` and `device_main` need torch.
"""

from gradbox_worker.device.process import DeviceNotStarted, DeviceProcess, DeviceSettings
from gradbox_worker.device.work import (
    Device,
    Died,
    Failed,
    Finished,
    Outcome,
    StopOrder,
    Stopped,
    Supervision,
    Work,
)

__all__ = [
    "Device",
    "DeviceNotStarted",
    "DeviceProcess",
    "DeviceSettings",
    "Died",
    "Failed",
    "Finished",
    "Outcome",
    "StopOrder",
    "Stopped",
    "Supervision",
    "Work",
]
