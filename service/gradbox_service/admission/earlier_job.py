"""The job that a job goes on from: it is the caller's own, it is done, and its result is here."""

from __future__ import annotations

from gradbox.errors import BlobRejected, InvalidInputs
from gradbox.protocol import JobSpec, JobState
from gradbox.tensors.safetensors_header import SafetensorsHeader, read_header
from gradbox_service.backing import Backing
from gradbox_service.jobs import JobRecord


def earlier_job(
    job_id: str, *, where: str, kind: str, owner: str, box: Backing
) -> tuple[JobRecord, JobSpec]:
    """Return the owner's job and its spec.

    Args:
        where: the field that names it, for messages.
        kind: what it is, as a noun: "forward job".

    Raises:
        InvalidInputs: the owner has no job of that id.
    """
    found = box.records.stored(job_id)
    spec = found.read_spec() if found is not None and found.record.owner == owner else None
    if found is None or spec is None:
        raise InvalidInputs(
            f"{where}: no job {job_id!r} of yours is on this box; post the {kind} first"
        )
    return found.record, spec


def result_header(record: JobRecord, *, where: str, kind: str, box: Backing) -> SafetensorsHeader:
    """Return the header of the job's result, which is kept longer for being used.

    Raises:
        InvalidInputs: the job is not done, or its result is not there.
    """
    if record.state is not JobState.DONE:
        raise InvalidInputs(
            f"{where}: expected job {record.id} to be done, it is {record.state.value}"
        )
    box.results.touch(record.id, attempt=record.attempt)
    try:
        return read_header(box.results.path(record.id, attempt=record.attempt))
    except (OSError, BlobRejected):
        raise InvalidInputs(
            f"{where}: the result of job {record.id} is not on this box any more; run the "
            f"{kind} again"
        ) from None
