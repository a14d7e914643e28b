"""A job's events, followed to its end over as many connections as that takes.

The wire format is that of server-sent events (WHATWG HTML, section 9.2): lines `id:`, `event:` and
`data:`, a blank line after each event, comments to keep the connection alive. After a break the
next request says `Last-Event-ID`, and the box goes on behind it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import ValidationError

from gradbox.errors import ProtocolError
from gradbox.http.connection import Connection, TransientFault, parsed
from gradbox.protocol import JobView, ProgressView

# The box sends at least a comment every 15 seconds: silence beyond this is a dead connection.
SILENCE_S: Final = 45.0
# How much later than asked a deadline may be noticed.
LATENESS_S: Final = 0.5


@dataclass(frozen=True)
class JobEvent:
    """One event: a new state of the job, or how far it is.

    `job` is set for a state, `progress` for progress.
    """

    id: str
    kind: Literal["state", "progress"]
    job: JobView | None = None
    progress: ProgressView | None = None

    @property
    def final(self) -> bool:
        return self.job is not None and self.job.state.final


class StreamEnded(TransientFault):
    """A stream of events ended in order, with none of a final state in it."""


def follow(
    connection: Connection,
    job_id: str,
    *,
    after: str | None = None,
    deadline_s: float | None = None,
) -> Iterator[JobEvent]:
    """Give a job's events up to the one of its final state; none if `after` is that one.

    Args:
        after: the id of the last event that was seen; from the first one if None.
        deadline_s: by `time.monotonic`.

    Raises:
        TimeoutError: the deadline came first.
        JobNotFound, Unauthorized: no such job for this token.
        ServiceUnavailable: the box stayed out of reach for longer than the connection's patience.
    """
    attempts = connection.attempts()
    over = False
    while True:
        silent = True
        try:
            for event in _one_connection(connection, job_id, after, deadline_s):
                attempts.succeeded()
                silent = False
                after = event.id or after
                yield event
                if event.final:
                    return
        except TransientFault as fault:
            if silent and isinstance(fault, StreamEnded):
                if over:
                    return
                # Asked once more if it is: the final event may have come after the silence.
                over = _is_over(connection, job_id)
                if over:
                    continue
            if deadline_s is None or time.monotonic() < deadline_s:
                attempts.pause(fault)
        if deadline_s is not None and time.monotonic() >= deadline_s:
            raise TimeoutError(f"job {job_id} was not over in time; it goes on")


def _is_over(connection: Connection, job_id: str) -> bool:
    return parsed(JobView, connection.request("GET", f"/v1/jobs/{job_id}")).state.final


def _one_connection(
    connection: Connection, job_id: str, after: str | None, deadline_s: float | None
) -> Iterator[JobEvent]:
    headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
    if after is not None:
        headers["Last-Event-ID"] = after
    wait_s = SILENCE_S
    if deadline_s is not None:
        wait_s = max(min(wait_s, deadline_s - time.monotonic()), 0.01)
    path = f"/v1/jobs/{job_id}/events"
    with connection.stream("GET", path, headers=headers, timeout_s=wait_s) as answer:
        fields: dict[str, str] = {}
        for line in _lines(answer.iter_bytes()):
            name, _, value = line.partition(":")
            if line and name in ("id", "event", "data"):
                value = value.removeprefix(" ")
                joined = name == "data" and name in fields
                fields[name] = f"{fields[name]}\n{value}" if joined else value
            elif not line and "data" in fields:
                event = _read(fields)
                if event is not None:
                    yield event
                fields = {}
            # A read waits `wait_s` for bytes: near the deadline, ask again with a shorter wait.
            if deadline_s is not None and time.monotonic() + wait_s > deadline_s + LATENESS_S:
                return
    raise StreamEnded(
        f"the events of job {job_id} at {connection.url} ended before the job did; it goes on"
    )


def _read(fields: dict[str, str]) -> JobEvent | None:
    """Read one event; None for a kind that this version does not know."""
    kind, data = fields.get("event"), fields["data"]
    try:
        if kind == "state":
            return JobEvent(fields.get("id", ""), "state", job=JobView.model_validate_json(data))
        if kind == "progress":
            progress = ProgressView.model_validate_json(data)
            return JobEvent(fields.get("id", ""), "progress", progress=progress)
    except ValidationError as error:
        raise ProtocolError(
            f"expected a {kind} event as docs/wire.md has it, got {data[:200]!r} ({error}); "
            f"is this client older or newer than the box?"
        ) from None
    return None


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Cut a stream into lines ended by CR LF or LF (not by what Unicode calls a line's end)."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r").decode()
