"""Which of the jobs that wait gets the next turn: the first, or one whose model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice
from typing import Final

from gradbox_service.jobs import JobRecord
from gradbox_service.queue.active_jobs import ActiveJobs

# A job whose model no worker has on its device lets others go before it: so many jobs, each among
# the next so many, of owners who are at most so many device seconds behind it in line.
MAX_PASSED_BY: Final = 4
LOOK_AHEAD: Final = 8
WARM_LEAD_S: Final = 10.0


class Choice:
    """Counts for each job how many went before it because their model was loaded."""

    def __init__(self, jobs: ActiveJobs, *, clock: Callable[[], float]) -> None:
        self._jobs = jobs
        self._clock = clock
        self._passed_by: dict[str, int] = {}

    def next(self, loaded: Collection[str]) -> JobRecord | None:
        """Return the job that is to have the next turn; None if none waits.

        Args:
            loaded: the models in the memory of the devices that may run it.
        """
        near = list(islice(self._jobs.ranked(), LOOK_AHEAD))
        if not near:
            self._passed_by.clear()
            return None
        first = near[0]
        passed_by = self._passed_by.pop(first.id, 0)
        if not loaded or first.model in loaded or passed_by >= MAX_PASSED_BY:
            return first
        shares = self._jobs.shares
        most = shares.key(first.owner) + WARM_LEAD_S * shares.weight(self._clock())
        for record in near[1:]:
            if record.priority != first.priority:
                break
            if record.model in loaded and shares.key(record.owner) <= most:
                self._passed_by[first.id] = passed_by + 1
                return record
        return first
