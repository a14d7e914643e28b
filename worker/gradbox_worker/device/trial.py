"""A models file that is read again, tried beside the device, which serves the models of before."""

from __future__ import annotations

import threading
from dataclasses import replace

from gradbox.protocol import ModelBuild
from gradbox_worker.device.child import DeviceSettings
from gradbox_worker.device.output import BoundedLog
from gradbox_worker.device.process import DeviceProcess
from gradbox_worker.errors import DeviceNotStarted


class TrialEnded(Exception):
    """Raised where the trial waits, once its end was asked for."""


class Trial:
    """Builds and tries every model in a process of its own, one at a time, on the CPU.

    Attributes:
        number: how many reloads were asked for, with this one.
        tried: the process, which has ended once the trial is over. It knows the models.
        failure: why it did not start, or None.
    """

    def __init__(self, settings: DeviceSettings, *, number: int, log: BoundedLog | None) -> None:
        """Begin.

        Args:
            settings: of the device that serves meanwhile.
            log: where that one's output goes.
        """
        self.number = number
        self.failure: DeviceNotStarted | None = None
        # Not from the template: adopting what it forks is no matter of one thread alone.
        alone = replace(settings, device="cpu", model_memory_bytes=0, template=False, beside=True)
        self.tried = DeviceProcess(alone, log=log)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trial", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether all models have been tried."""
        return not self._thread.is_alive()

    @property
    def building(self) -> ModelBuild | None:
        """The model that is being built."""
        return self.tried.building

    def end(self) -> None:
        """End it, over or not."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        # From its start to its end in one thread: the process is killed with that.
        try:
            self.tried.ensure(while_waiting=self._check)
        except DeviceNotStarted as error:
            self.failure = error
        except TrialEnded:
            pass
        finally:
            self.tried.close()

    def _check(self) -> None:
        if self._ending.is_set():
            raise TrialEnded
