"""What attempts at jobs cost their owners.

charge_of        what a change of a record costs: a pure function
with_running     adds what attempts that still run have used so far
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from gradbox.protocol import JobState
from gradbox_service.accounting.usage import (
    HOUR_S,
    MINUTE_S,
    MINUTES_KEPT,
    BusyByWorker,
    Charge,
    Used,
    UsedByHour,
    add_busy,
    add_use,
    spread,
)
from gradbox_service.jobs.record import JobRecord

# An attempt is not taken for longer than this, whatever the clocks of two machines say.
LONGEST_ATTEMPT_S: Final = 48 * HOUR_S


def charge_of(before: JobRecord | None, after: JobRecord, *, now_s: float) -> Charge | None:
    """Return what a change of a record costs; None if it ends no attempt and no job.

    Args:
        now_s: when an attempt ended that did not end its job.
    """
    ended_s = now_s if after.finished_s is None else after.finished_s
    attempt = None
    if before is not None and before.state is JobState.RUNNING and before.attempt:
        attempt = before if after.state is not JobState.RUNNING else None
    ends = after.state.final and not (before is not None and before.state.final)
    if attempt is None and not ends:
        return None
    charge = Charge(after.owner) if attempt is None else _held(attempt, until_s=ended_s)
    if not ends:
        return charge
    hour = int(ended_s // HOUR_S)
    own = Used(result_bytes=after.result_bytes, num_jobs=1)
    return replace(charge, by_hour={**charge.by_hour, hour: charge.by_hour.get(hour, Used()) + own})


def with_running(used: UsedByHour, running: Iterable[JobRecord], *, now_s: float) -> UsedByHour:
    """Add to what was charged what attempts that still run have used so far."""
    found = {hour: dict(owners) for hour, owners in used.items()}
    for record in running:
        add_use(found, _held(record, until_s=now_s))
    return found


def busy_with_running(
    busy_ms: BusyByWorker, running: Iterable[JobRecord], *, now_s: float
) -> BusyByWorker:
    """Add to the minutes that were charged those of attempts that still run."""
    found = {worker: dict(minutes) for worker, minutes in busy_ms.items()}
    for record in running:
        add_busy(found, _held(record, until_s=now_s))
    return found


def _held(record: JobRecord, *, until_s: float) -> Charge:
    """Return the charge of the record's attempt from its begin to `until_s`."""
    began_s = until_s if record.started_s is None else record.started_s
    began_s = max(began_s, until_s - LONGEST_ATTEMPT_S)
    shown_s = max(began_s, until_s - MINUTES_KEPT * MINUTE_S)
    hours = spread(began_s, until_s, width_s=HOUR_S)
    return Charge(
        owner=record.owner,
        worker=record.worker,
        by_hour={hour: Used(device_ms=ms) for hour, ms in hours.items()},
        busy_ms=spread(shown_s, until_s, width_s=MINUTE_S),
    )
