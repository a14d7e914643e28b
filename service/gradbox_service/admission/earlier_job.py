"""The job that a job reads: it is the caller's own, it is done, and its result is here.

`against` names one, whose rows a per-sample job's are multiplied with; cotangents are of another,
see `forward_job`.
"""

from __future__ import annotations

from typing import Protocol

from gradbox.errors import BlobRejected, InvalidInputs
from gradbox.protocol import JobSpec, JobState, ModelView, SampleSpec
from gradbox.tensors.checksums import checked_header
from gradbox.tensors.safetensors_header import SafetensorsHeader
from gradbox_service.backing import Backing
from gradbox_service.jobs import JobRecord

FACTORED_ROWS = "job with factored rows"


class Recorded(Protocol):
    """The jobs that a job may read: a box's `Records`, or those that this process has run."""

    def get(self, job_id: str) -> JobRecord | None:
        """Return a job's record."""

    def spec(self, job_id: str) -> JobSpec | None:
        """Return its spec."""


def earlier_job(
    job_id: str, *, where: str, kind: str, owner: str, records: Recorded
) -> tuple[JobRecord, JobSpec]:
    """Return the owner's job and its spec.

    Args:
        where: the field that names it, for messages.
        kind: what it is, as a noun: "forward job".

    Raises:
        InvalidInputs: the owner has no job of that id, or it is not done.
    """
    found = records.get(job_id)
    record = found if found is not None and found.owner == owner else None
    if record is not None and record.state is not JobState.DONE:
        raise InvalidInputs(
            f"{where}: expected job {record.id} to be done, it is {record.state.value}"
        )
    spec = None if record is None else records.spec(job_id)
    if record is None or spec is None:
        raise InvalidInputs(
            f"{where}: no job {job_id!r} of yours is on this box; post the {kind} first"
        )
    return record, spec


def check_against(
    spec: JobSpec, *, model: ModelView, owner: str, records: Recorded
) -> JobRecord | None:
    """Check that `against`, if there is one, names rows that these can be multiplied with.

    Returns:
        The job that left them.

    Raises:
        InvalidInputs: the owner has no such job that is done, it was of another computation or
            model, or it left no factors.
    """
    if not isinstance(spec, SampleSpec) or spec.against is None:
        return None
    record, other = earlier_job(
        spec.against, where="against", kind=FACTORED_ROWS, owner=owner, records=records
    )
    if type(other) is not type(spec):
        raise InvalidInputs(
            f"against: expected a job of the same computation, {spec.computation}, got job "
            f"{record.id}, which is a {record.computation}"
        )
    if other.reduce != "none" or other.form == "dense":
        raise InvalidInputs(
            f"against: expected a job whose rows are kept as factors, got job {record.id} with "
            f"reduce={other.reduce!r} and form={other.form!r}; run it with reduce='none' and "
            f"form='factored' or 'auto'"
        )
    if (record.model, record.model_version) != (model.name, model.version):
        raise InvalidInputs(
            f"against: expected rows of {model.name}@{model.version[:12]}, got those of job "
            f"{record.id}, which ran {record.model}@{record.model_version[:12]}; run it again"
        )
    return record


def result_header(record: JobRecord, *, where: str, kind: str, box: Backing) -> SafetensorsHeader:
    """Return the header of a done job's result, which is kept longer for being used.

    Raises:
        InvalidInputs: its result is not there, or damaged.
    """
    try:
        with box.results.open(record.id, attempt=record.attempt) as file:
            return checked_header(file)
    except (OSError, BlobRejected):
        raise result_gone(record, where=where, kind=kind) from None


def result_gone(record: JobRecord, *, where: str, kind: str) -> InvalidInputs:
    """Return the error of a job that reads a result which is not there, or not what was written."""
    return InvalidInputs(
        f"{where}: the result of job {record.id} is not on this box any more, or damaged; run the "
        f"{kind} again"
    )
