"""Whether a box hands jobs to its workers, and takes new ones: what its owner said last.

running     both
paused      jobs are taken and wait; what runs goes on
draining    new jobs are refused, too; the box ends once nothing runs
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import StringConstraints

from gradbox.graphs.wire_form import WireForm
from gradbox.protocol.views import View


class OperationMode(StrEnum):
    """See the module."""

    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"


class OperationView(View):
    """The mode that a box is in, since when (seconds since 1970, UTC), by whom and why."""

    mode: OperationMode = OperationMode.RUNNING
    reason: str = ""
    by: str = ""
    since_s: float | None = None

    @property
    def hold(self) -> str | None:
        """Why no job that waits is handed to a worker; None while jobs are."""
        return None if self.mode is OperationMode.RUNNING else str(self)

    def __str__(self) -> str:
        by = f" by {self.by}" if self.by and self.mode is not OperationMode.RUNNING else ""
        return f"{self.mode}{by}{f': {self.reason}' if self.reason else ''}"


class OperationOrder(WireForm, frozen=True):
    """What the box's owner puts to /v1/operation."""

    mode: OperationMode
    reason: Annotated[str, StringConstraints(max_length=200)] = ""
