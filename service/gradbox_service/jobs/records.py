"""Where job records live: the protocol that Redis and the in-memory twin both keep."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

from gradbox.errors import IdempotencyConflict
from gradbox.protocol import JobSpec, JobState
from gradbox_service.jobs.place import Place
from gradbox_service.jobs.record import JobRecord, Transition

# An idempotency key is remembered this long.
KEY_LIFETIME_S = 7 * 24 * 3600
# A job's stream keeps about this many events. A reader that missed older ones misses nothing: the
# newest state is always among the kept.
MAX_EVENTS = 1000
# Who looks at a queued job follows it for so long; a listener says so again before.
FOLLOWED_S: Final = 15.0


@dataclass(frozen=True)
class Event:
    """One entry of a job's stream.

    Attributes:
        id: grows along the stream; `after=id` reads on behind it.
        kind: `state` (data is a JobView) or `progress` (data is a ProgressView).
        data: JSON.
        final: whether this is the job's last event.
    """

    id: str
    kind: Literal["state", "progress"]
    data: str
    final: bool = False


@dataclass(frozen=True)
class Change:
    """Says that something about a job is new; what it is stands in the job's own stream.

    `final` is set where the job has ended. `record` is how the change left the job's record; None
    where it has to be read: it was large, or an earlier version of gradbox made the change.

    Three are about no job: `worker`, that one announced something, `wake`, which ends every wait,
    and `missed`, that changes were trimmed before this reader came to them.
    """

    job_id: str
    kind: Literal["state", "progress", "position", "worker", "wake", "missed"]
    final: bool = False
    record: JobRecord | None = None


class Mark(NamedTuple):
    """A point in a list of jobs that is ordered by creation; it stays good when jobs go."""

    created_s: float
    job_id: str


@dataclass(frozen=True)
class Memory:
    """How much memory a store takes; `bound_bytes` is None for one without a bound."""

    used_bytes: int
    bound_bytes: int | None = None


class Records(Protocol):
    """The job records of a box. Every method is safe to call from several processes at once."""

    def create(
        self, record: JobRecord, *, spec: JobSpec, idempotency_key: str | None = None
    ) -> JobRecord:
        """Store a queued job, or return the one that its owner posted before under the same key.

        A job that is stored already, under its id, is returned as it is now.

        Raises:
            IdempotencyConflict: the key was used with another spec.
        """

    def posted(self, owner: str, *, idempotency_key: str, spec_digest: str) -> JobRecord | None:
        """Return the job that `owner` posted under this key, if there is one.

        Raises:
            IdempotencyConflict: the key was used with another spec.
        """

    def get(self, job_id: str) -> JobRecord | None:
        """Return the record, or None if there is no such job."""

    def spec(self, job_id: str) -> JobSpec | None:
        """Return what was posted; None if there is no such job, or it failed or was cancelled."""

    def many(self, job_ids: Sequence[str]) -> Sequence[JobRecord]:
        """Return the records that there are of these jobs."""

    def owned(
        self,
        owner: str,
        *,
        state: JobState | None = None,
        limit: int = 100,
        after: Mark | None = None,
    ) -> Sequence[JobRecord]:
        """Return an owner's jobs, newest first; only those behind `after` if it is given."""

    def oldest(self, owner: str) -> Iterator[JobRecord]:
        """Give an owner's jobs, oldest first."""

    def num_by_owner(self) -> Mapping[str, int]:
        """Return how many jobs everybody has who has any."""

    def owners(self) -> Sequence[str]:
        """Return everybody who ever had a job here, by name."""

    def num_active(self, owner: str) -> int:
        """Return how many of an owner's jobs are queued or running."""

    def spec_bytes(self, owner: str) -> int:
        """Return what the specs of an owner's queued and running jobs take."""

    def active(self) -> Sequence[JobRecord]:
        """Return every queued and running job, oldest first."""

    def active_ids(self) -> Sequence[str]:
        """Return the ids of every queued and running job, oldest first."""

    def update(
        self,
        job_id: str,
        transition: Transition,
        *,
        lease_s: float | None = None,
    ) -> JobRecord | None:
        """Apply `transition` to the newest record and append the event, as one transaction.

        A change after the job's end has no event: the final state was the last one.

        Args:
            transition: may be called several times, so it must be pure.
            lease_s: also grant the resulting attempt a lease of this length; used with `begin`.

        Returns:
            The new record; None if there is no such job or the transition does not apply.
        """

    def beat(self, job_id: str, *, attempt: int, lease_s: float) -> JobRecord | None:
        """Renew an attempt's lease and return the newest record.

        The holder calls this at least every half second and obeys what comes back: if the record is
        None or no longer `held_by(attempt)`, the job is not its own any more; if
        `cancel_requested`, the job is to be stopped. The record is the signal, so none gets lost.
        """

    def leased(self, job_id: str, *, attempt: int) -> bool:
        """Tell whether the attempt's lease has not run out."""

    def events(self, job_id: str, *, after: str | None = None) -> Sequence[Event]:
        """Return the job's events behind the one with id `after`, oldest first."""

    def changes(self, after: str | None, *, wait_s: float) -> tuple[str, Sequence[Change]]:
        """Wait for changes of any job behind the cursor `after`; None means from now on.

        Returns:
            The next cursor, and the changes; none if `wait_s` went by without one. One of kind
            `missed` comes first if some were trimmed unread.
        """

    def wake(self) -> None:
        """End the present wait of everyone in `changes`."""

    def follow(self, job_ids: Sequence[str], *, for_s: float = FOLLOWED_S) -> Mapping[str, Place]:
        """Ask that these queued jobs be told their places, for the next `for_s` seconds.

        Returns:
            Those that are stored now.
        """

    def followed(self) -> Collection[str]:
        """Return the jobs that somebody follows."""

    def place(self, places: Mapping[str, Place], *, told: Collection[str] = ()) -> None:
        """Store where queued jobs stand, in place of what was stored, and tell some of them."""

    def places(self, job_ids: Sequence[str] | None = None) -> Mapping[str, Place]:
        """Return the places that are stored: of these jobs, or all."""

    def ended(self, *, before_s: float, limit: int) -> Sequence[str]:
        """Return the ids of jobs that ended before a time, oldest first."""

    def forget(self, job_id: str) -> None:
        """Remove all that is known of a job that has ended."""

    def result_bytes(self) -> Mapping[str, int]:
        """Return what the results of every owner take on disk."""

    def memory(self) -> Memory:
        """Return how much memory the store takes, and may take."""

    def ping(self) -> None:
        """Raise what the store raises if it does not answer."""


def check_same_spec(key: str, *, stored: str, posted: str) -> None:
    """Raises:
    IdempotencyConflict: the digests differ.
    """
    if stored != posted:
        raise IdempotencyConflict(
            f"the Idempotency-Key {key!r} came before with another job (spec digest "
            f"{stored[:12]}…, now {posted[:12]}…); send a new key with a new job"
        )
