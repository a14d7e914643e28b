"""Which model a device process builds before it is ready, and whether that ended the process."""

from __future__ import annotations

import logging
import time
from typing import Final

from gradbox.protocol import ModelBuild, ModelView
from gradbox_worker.device.exits import Exit

log = logging.getLogger(__name__)

# A SIGKILL says nothing about a model, but what watches over memory kills so, too: not the kernel
# alone, which counts, but also a program such as earlyoom, which does not.
KILLED_AT_MOST: Final = 3


class Builds:
    """The models that are built, one after the other, in one process after the other.

    Attributes:
        current: the one that is being built, or None.
    """

    def __init__(self, *, timeout_s: float) -> None:
        """Know of none; each may take so long."""
        self.current: ModelBuild | None = None
        self._timeout_s = timeout_s
        self._until_s = 0.0
        self._killed = ("", 0)  # the model at which the last process was killed; times in a row

    def note(self, building: ModelBuild | None) -> None:
        """Note what a process says that it builds, and log it if that is new."""
        if building is not None and building != self.current:
            log.info("building and trying the model %r", building.model)
            took_s = max(0.0, time.time() - building.since_s)
            self._until_s = time.monotonic() + self._timeout_s - took_s
        self.current = building

    def over(self) -> None:
        """Note that a process has built all it had to."""
        self.current, self._killed = None, ("", 0)

    def overdue(self) -> bool:
        """Return whether the model has taken all the time that it has."""
        return self.current is not None and time.monotonic() >= self._until_s

    def left_out_after(self, ended: Exit) -> ModelView | None:
        """Return the model that is not to be built again, with the reason; None if there is none.

        It is the one that was being built, if its time was up, if the process met a fault of its
        own, or was killed there as often as `KILLED_AT_MOST` in a row.
        """
        if self.current is None:
            return None
        model, overdue = self.current.model, self.overdue()
        self.current = None
        if ended.fault is None and not overdue:
            last, times = self._killed
            self._killed = (model, times + 1 if model == last else 1)
            if self._killed[1] < KILLED_AT_MOST:
                return None
        reason = f"the process that built it ended: {ended.reason}; see its log"
        if overdue:
            reason = (
                f"expected it to be built and tried within {self._timeout_s:g} s "
                f"(--build-timeout-s), but it still was not"
            )
        log.warning("the model %r cannot be used: %s", model, reason)
        return ModelView(name=model, usable=False, reason=f"models.{model}: {reason}")
