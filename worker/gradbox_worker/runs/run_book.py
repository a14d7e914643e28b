"""What the service keeps of runs, as far as a device needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gradbox.protocol import RunSpec, StepSpec


@dataclass(frozen=True)
class KnownRun:
    """A run as its record says.

    Attributes:
        num_steps: how many are recorded as made; a run that goes on from a saved state has that
            one's from the beginning.
        last_job: the job that made the last of them; "" before the run's first.
    """

    id: str
    spec: RunSpec
    model_version: str
    num_steps: int
    last_job: str


@dataclass(frozen=True)
class KeptStep:
    """A step that was made and that no state file covers for good.

    Attributes:
        spec: as it was run, with all that comes from its run filled in.
        job: that made it.
        earlier_result: of the forward job whose cotangents it was given.
    """

    number: int
    spec: StepSpec
    job: str
    earlier_result: Path | None = None


class RunBook(Protocol):
    """The records of runs, shared by all devices of a box."""

    def run(self, run_id: str) -> KnownRun | None:
        """Return a run, None if there is none of this id."""

    def kept_steps(self, run_id: str) -> Sequence[KeptStep]:
        """Return the steps that were made since the older of the run's two state files."""

    def states_written(self, run_id: str, *, steps: Sequence[int], size_bytes: int) -> None:
        """Note of which steps there are state files: of two, or of the first that was written.

        Where there are two, the steps up to the older one need not be kept any more.

        Args:
            steps: the newest first.
            size_bytes: of these files.
        """
