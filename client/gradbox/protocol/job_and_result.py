"""A job and its small result as one body.

8 bytes     the length of the JSON, little-endian
the JSON    the job, as `GET /v1/jobs/{id}` gives it
the rest    the result file, whose size and digest the JSON states
"""

from __future__ import annotations

from typing import Final

from gradbox.protocol.views import JobView

JOB_AND_RESULT: Final = "application/vnd.gradbox.job-and-result"
LENGTH_BYTES: Final = 8


def joined(view: JobView, result: bytes) -> bytes:
    """Return the body."""
    text = view.model_dump_json().encode()
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + result


def parted(body: bytes) -> tuple[JobView, memoryview]:
    """Return the job and the bytes of its result, which are not verified here.

    Raises:
        ValueError: the body has another form.
    """
    end = LENGTH_BYTES + int.from_bytes(body[:LENGTH_BYTES], "little")
    if len(body) < end:
        raise ValueError(f"expected {end} bytes or more, got {len(body)}")
    return JobView.model_validate_json(body[LENGTH_BYTES:end]), memoryview(body)[end:]
