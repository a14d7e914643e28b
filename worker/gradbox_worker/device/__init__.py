"""The device process: computes one job after the other and keeps the models between them.

On the worker's side, without torch: `process` has one that is ready and runs a job on it, `child`
is one such process from its start to its end, `template` is what it is forked from, and
`parentage` makes it the worker's own; `exits` says how it ended and whether it would end so again,
`builds` which model it was building then,
`descendants` ends what it leaves behind, `output` keeps what it prints. `messages` is what travels
over the pipe. On the device's side: `main` is its entry point and the template's, `importing` what
is imported before it is needed, `forking` the template's loop, `serving` its own once torch is
there, and `warm_device` what that runs jobs on.
"""

from gradbox_worker.device.child import DeviceSettings
from gradbox_worker.device.process import DeviceProcess

__all__ = ["DeviceProcess", "DeviceSettings"]
