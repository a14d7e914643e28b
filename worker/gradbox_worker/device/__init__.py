"""The device process: computes one job after the other and keeps the models between them.

To read in this order:

    settings            what such a process is started with
    warm_device         what it runs jobs on
    orders, last_step   the two signals that it hears; the page in which it notes each step
    entry               what it notes in Redis of itself
    process             the worker's side: starts it, looks at it, ends it and starts the next
    exits, builds       how it ended, and whether it would again; which model it was building
    descendants         ends what it leaves behind
    output              keeps what it prints
    importing           what it imports before a job needs it

What it does all day, take turns, is `gradbox_worker.turns`. `warm_device` alone needs torch.
"""

from gradbox_worker.device.process import DeviceProcess
from gradbox_worker.device.settings import DeviceSettings

__all__ = ["DeviceProcess", "DeviceSettings"]
