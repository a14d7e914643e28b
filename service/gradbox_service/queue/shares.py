"""How many device seconds each owner used, where recent ones weigh more.

A second that was used `half_life_s` ago counts half. Instead of making every sum smaller as time
goes by, a later second is counted larger: its weight at time t is 2**((t - epoch) / half_life_s),
and the sums are divided by today's weight when they are shown (forward decay: Cormode et al.,
2009). All sums are divided by the same weight, so the order of owners changes only when one of
them is charged.

A job that is handed out holds the seconds that it is expected to take, until it ends and is charged
what it took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from gradbox_service.accounting.usage import HOUR_S, UsedByHour
from gradbox_service.jobs import JobRecord

# Use older than this many half-lives counts less than a thousandth and is not read.
HALF_LIVES_READ: Final = 10
# An owner who comes back is at most this many device seconds ahead of the others: who left the box
# to them for a day does not have it alone for the next.
MAX_LEAD_S: Final = 600.0
# Expected of a job before any has ended.
UNKNOWN_S: Final = 1.0
# Of the newest job's seconds in the running mean.
NEWEST_FRACTION: Final = 0.3
# Weights beyond 2**REBASE_AT are made small again, far from the largest float.
REBASE_AT: Final = 200.0


class Shares:
    """The use of each owner, in weighted device seconds."""

    def __init__(self, *, half_life_s: float) -> None:
        self.half_life_s = half_life_s
        self._epoch_s = 0.0
        self._used: dict[str, float] = {}
        self._held: dict[str, tuple[str, float]] = {}  # by job: owner, weighted seconds
        self._held_by: dict[str, float] = {}

    def load(self, used: UsedByHour, *, now_s: float) -> None:
        """Begin anew with what was charged; an hour counts as used in its middle."""
        self._epoch_s = now_s
        for sums in (self._used, self._held, self._held_by):
            sums.clear()
        for hour, owners in used.items():
            at_s = min(now_s, (hour + 0.5) * HOUR_S)
            for owner, amount in owners.items():
                self.charge(owner, amount.device_ms / 1000, at_s=at_s)

    def charge(self, owner: str, seconds: float, *, at_s: float) -> None:
        """Count device seconds for an owner."""
        self._used[owner] = self._used.get(owner, 0.0) + seconds * self.weight(at_s)

    def hold(self, job_id: str, owner: str, seconds: float, *, now_s: float) -> None:
        """Count a job's expected seconds until `free`; again, to change them."""
        self.free(job_id)
        weighted = seconds * self.weight(now_s)
        self._held[job_id] = (owner, weighted)
        self._held_by[owner] = self._held_by.get(owner, 0.0) + weighted

    def free(self, job_id: str) -> None:
        """Count a job's expected seconds no more."""
        owner, weighted = self._held.pop(job_id, ("", 0.0))
        if weighted:
            # Added up again: subtraction would leave a rounding error, for ever.
            others = [held for other, held in self._held.values() if other == owner]
            self._held_by[owner] = sum(others)

    def held(self, job_id: str) -> float:
        """Return the weighted seconds that a job holds."""
        return self._held.get(job_id, ("", 0.0))[1]

    def arrive(self, owner: str, present: Iterable[str], *, now_s: float) -> None:
        """Bound the lead of an owner who had no job here over those who have."""
        uses = [self.key(other) for other in present if other != owner]
        if uses:
            floor = min(uses) - MAX_LEAD_S * self.weight(now_s)
            self._used[owner] = max(self._used.get(owner, 0.0), floor)

    def key(self, owner: str) -> float:
        """Return what owners are compared by: less goes first. It changes when it is charged."""
        return self._used.get(owner, 0.0) + self._held_by.get(owner, 0.0)

    def used_s(self, *, now_s: float) -> Mapping[str, float]:
        """Return the device seconds of each owner as they count now."""
        weight = self.weight(now_s)
        return {owner: used / weight for owner, used in self._used.copy().items()}

    def weight(self, at_s: float) -> float:
        """Return what a second counts that is used at `at_s`."""
        exponent: float = (at_s - self._epoch_s) / self.half_life_s
        weight: float = 2.0 ** min(exponent, REBASE_AT)
        return weight

    def rebase(self, now_s: float) -> bool:
        """Make the weights small again if they became large; True if all keys changed."""
        if (now_s - self._epoch_s) / self.half_life_s < REBASE_AT / 2:
            return False
        weight = self.weight(now_s)
        self._used = {owner: used / weight for owner, used in self._used.items()}
        self._held = {job: (owner, held / weight) for job, (owner, held) in self._held.items()}
        self._held_by = {owner: held / weight for owner, held in self._held_by.items()}
        self._epoch_s = now_s
        return True


class Durations:
    """How long jobs of one kind take: a running mean of device seconds."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, ...], float] = {}

    def note(self, record: JobRecord, seconds: float) -> None:
        """Learn from an attempt that ended."""
        for kind in _kinds(record):
            mean = self._means.get(kind, seconds)
            self._means[kind] = mean + NEWEST_FRACTION * (seconds - mean)

    def expected_s(self, record: JobRecord) -> float:
        """Return what a job will take: as estimated, or by the closest kind that has ended."""
        if record.estimate is not None and record.estimate.seconds is not None:
            return record.estimate.seconds
        for kind in _kinds(record):
            if kind in self._means:
                return self._means[kind]
        return UNKNOWN_S


def _kinds(record: JobRecord) -> tuple[tuple[str, ...], ...]:
    kind = (record.model, record.computation)
    return ((*kind, record.owner), kind, ())
