"""Which model a device process builds before it is ready, and whether that ended the process."""

from __future__ import annotations

import logging
from typing import Final

from gradbox.protocol import ModelView
from gradbox_worker.device.exits import Exit

log = logging.getLogger(__name__)

# A SIGKILL says nothing about a model, but what watches over memory kills so, too: not the kernel
# alone, which counts, but also a program such as earlyoom, which does not.
KILLED_AT_MOST: Final = 3


class Builds:
    """The models that are built, one after the other, in one process after the other."""

    def __init__(self) -> None:
        """Know of none."""
        self._model = ""
        self._killed = ("", 0)  # the model at which the last process was killed; times in a row

    def begins(self, model: str) -> None:
        """Note that a process begins with a model, and say so: it may take for ever there."""
        log.info("building and trying the model %r", model)
        self._model = model

    def over(self) -> None:
        """Note that a process has built all it had to."""
        self._model, self._killed = "", ("", 0)

    def left_out_after(self, ended: Exit) -> ModelView | None:
        """Return the model that is not to be built again, with the reason; None if there is none.

        It is the one that was being built, if the process met a fault of its own, or was killed
        there as often as `KILLED_AT_MOST` in a row.
        """
        model, self._model = self._model, ""
        if not model:
            return None
        if ended.fault is None:
            last, times = self._killed
            self._killed = (model, times + 1 if model == last else 1)
            if self._killed[1] < KILLED_AT_MOST:
                return None
        reason = f"models.{model}: the process that built it ended: {ended.reason}; see its log"
        log.warning("the model %r cannot be used: %s", model, reason)
        return ModelView(name=model, usable=False, reason=reason)
