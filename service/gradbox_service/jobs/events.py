"""What a record's change says to those who watch the job."""

from __future__ import annotations

from dataclasses import replace

from gradbox_service.jobs.place import Place
from gradbox_service.jobs.record import JobRecord
from gradbox_service.jobs.records import Event


def event_of(before: JobRecord | None, after: JobRecord) -> Event | None:
    """Return the event of a change, without its id; None for a change after the job's end.

    A result may be deleted then; the final state is told once, and is the stream's last event.
    """
    if before is not None and before.state.final:
        return None
    if before is not None and replace(before, progress=after.progress) == after and after.progress:
        return Event("", "progress", after.progress.model_dump_json())
    return state_event(after)


def state_event(record: JobRecord, *, place: Place | None = None) -> Event:
    """Return the event that tells a job's state, without its id."""
    view = record.view(place=place)
    return Event("", "state", view.model_dump_json(), record.state.final)


def parse_id(event_id: str | None) -> tuple[int, int]:
    """Return an event's id as numbers that can be compared; (0, 0) for one that is no id."""
    first, _, second = (event_id or "").partition("-")
    if not _is_number(first) or (second and not _is_number(second)):
        return (0, 0)
    return (int(first), int(second or 0))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 19
