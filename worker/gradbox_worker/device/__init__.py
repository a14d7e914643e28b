"""The device process: computes one job after the other and keeps the models between them.

To read in this order:

    process             the worker's side: a process that is ready, and a job that runs on it
    messages            what travels over the pipe between the two
    child, parentage    one such process from its start to its end, as the worker's own child
    exits, builds       how it ended, and whether it would again; which model it was building
    trial               a models file that is read again, tried beside the device
    template            the process that it is forked from
    descendants         ends what it leaves behind
    output              keeps what it prints
    main, importing     the device's side: the entry point of both; what is imported ahead of time
    forking             the template's loop
    serving             the device's, once torch is there
    warm_device         what that runs jobs on

All but the last two, and the template's imports, are without torch.
"""

from gradbox_worker.device.child import DeviceSettings
from gradbox_worker.device.process import DeviceProcess
from gradbox_worker.device.trial import Trial

__all__ = ["DeviceProcess", "DeviceSettings", "Trial"]
