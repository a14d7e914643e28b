"""What each job would have waited had the device been shared equally among those who were active.

    a_j, s_j      when job j was submitted, and the device seconds that it took
    A(t)          the number of people with a job that is submitted and not done at time t
    F_j           when job j would have ended if at every moment each of the A(t) people had 1/A(t)
                  of the device, all of it for the oldest of their own jobs
    F_j - a_j     the fair wait for its result, the job's own seconds included

This is generalised processor sharing with equal weights (Parekh and Gallager 1993), which no device
can do that runs one job at a time, and which gives nobody a reason to complain. What was submitted
when is taken as it was: nobody submits earlier because a result would have come earlier.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

NOTHING_S = 1e-9


@dataclass(frozen=True)
class Ran:
    """One job as it went; times in seconds."""

    person: str
    submitted_s: float
    started_s: float
    ended_s: float

    @property
    def device_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def waited_s(self) -> float:
        return self.ended_s - self.submitted_s


@dataclass
class _Line:
    """One person's jobs that are not done: numbers, and the device seconds they still need."""

    jobs: deque[tuple[int, float]] = field(default_factory=deque)

    def serve(self, seconds: float) -> None:
        number, left = self.jobs[0]
        self.jobs[0] = (number, left - seconds)

    @property
    def left_s(self) -> float:
        return self.jobs[0][1]


def fair_waits(jobs: Sequence[Ran]) -> list[float]:
    """Return F_j - a_j of each job, in seconds."""
    coming = deque(sorted(range(len(jobs)), key=lambda j: jobs[j].submitted_s))
    # Counted from the first submit: of seconds since 1970 a float holds no small differences.
    submitted_s = [job.submitted_s - jobs[coming[0]].submitted_s for job in jobs]
    lines: dict[str, _Line] = {}
    waits = [0.0] * len(jobs)
    now = 0.0
    while coming or lines:
        until_next_s = submitted_s[coming[0]] - now if coming else math.inf
        least_s = min((line.left_s for line in lines.values()), default=math.inf)
        step_s = min(until_next_s, least_s * len(lines) if lines else math.inf)
        for line in lines.values():
            line.serve(step_s / len(lines))
        now += step_s
        for person, line in list(lines.items()):
            while line.jobs and line.left_s <= NOTHING_S:
                number, _ = line.jobs.popleft()
                waits[number] = now - submitted_s[number]
            if not line.jobs:
                del lines[person]
        while coming and submitted_s[coming[0]] <= now + NOTHING_S:
            number = coming.popleft()
            line = lines.setdefault(jobs[number].person, _Line())
            line.jobs.append((number, max(2 * NOTHING_S, jobs[number].device_s)))
    return waits
