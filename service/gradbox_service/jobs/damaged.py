"""What becomes of a job whose record cannot be read: not JSON, a field missing, a later version.

The bytes are logged and set aside under `gradbox:set-aside`, for the box's owner to look at, and
the job is failed with as much of its record as still makes sense. So one bad record ends one job,
not the loop that read it.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from gradbox.errors import JobFailed
from gradbox.protocol import JobState, Problem
from gradbox_service.jobs.record import JobRecord

log = logging.getLogger(__name__)

# A hash: job id → the bytes of its record.
SET_ASIDE: Final = "gradbox:set-aside"
UNKNOWN: Final = "unknown"
# As much of the bytes goes into the log; all of them are set aside.
MAX_LOGGED_BYTES: Final = 2000


def read_record(text: bytes | None) -> JobRecord | None:
    """Return the record; None where there is none.

    Raises:
        ValueError: the bytes are damaged.
    """
    return None if text is None else JobRecord.from_json(text)


def failed_record(
    job_id: str, text: bytes, *, reason: Exception, owner: str | None, now_s: float
) -> JobRecord:
    """Log the bytes and return the record that takes their place.

    Args:
        reason: why they cannot be read.
        owner: whose job it is, as far as is known without the bytes.
    """
    log.error(
        "the record of job %s cannot be read (%s); it is set aside in %s and the job failed: %r",
        job_id,
        " ".join(str(reason).split())[:500],
        SET_ASIDE,
        text[:MAX_LOGGED_BYTES],
    )
    fields = _fields(text)
    error = JobFailed(
        f"the record of job {job_id} was damaged in the box's store and is set aside; submit the "
        f"job again, and tell the box's owner, whose service's log has the record"
    )
    attempt, created_s = fields.get("attempt"), fields.get("created_s")
    return JobRecord(
        id=job_id,
        owner=owner or _text(fields, "owner"),
        computation=_text(fields, "computation"),
        model=_text(fields, "model"),
        model_version=_text(fields, "model_version"),
        spec_digest=_text(fields, "spec_digest"),
        created_s=float(created_s) if isinstance(created_s, int | float) else now_s,
        # So that an attempt that still runs finds that it does not count.
        attempt=attempt if isinstance(attempt, int) else 0,
        state=JobState.FAILED,
        error=Problem.of(error),
        finished_s=now_s,
    )


def _fields(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) and value else UNKNOWN
