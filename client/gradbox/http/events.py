"""A job's events, followed to its end over as many connections as that takes.

The wire format is that of server-sent events (WHATWG HTML, section 9.2), which httpx-sse reads.
Comments keep the connection alive. After a break the next request says `Last-Event-ID`, and the box
continues behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

import httpx
from httpx_sse import EventSource, ServerSentEvent
from pydantic import ValidationError

from gradbox.errors import ProtocolError
from gradbox.http.connection import Connection, TransientFault
from gradbox.protocol import JobView, ProgressView

# The box sends at least a comment every 15 seconds: silence beyond this is a dead connection.
SILENCE_S: Final = 45.0


@dataclass(frozen=True)
class JobEvent:
    """One event: a new state of a job, or how far it is.

    Attributes:
        id: what `Job.events(after=...)` takes.
        kind: which of the two it is.
        job: the job in its new state; None where the event is progress.
        progress: how far the job is; None where the event is a state.
    """

    id: str
    kind: Literal["state", "progress"]
    job: JobView | None = None
    progress: ProgressView | None = None

    @property
    def final(self) -> bool:
        """Whether the job is over, so that no event follows."""
        return self.job is not None and self.job.state.final


class StreamEnded(TransientFault):
    """A stream of events ended in order, with none of a final state in it."""


def follow(
    connection: Connection,
    job_id: str,
    *,
    after: str | None = None,
) -> Iterator[JobEvent]:
    """Give a job's events up to the one of its final state; none if `after` is that one.

    Args:
        after: the id of the last event that was seen; from the first one if None.

    Raises:
        JobNotFound, Unauthorized: no such job for this token.
        ServiceUnavailable: the box stayed out of reach for longer than the connection's patience.
    """
    backoff = connection.backoff()
    over = False
    while True:
        silent = True
        try:
            for event in _one_connection(connection, job_id, after):
                backoff.reset()
                silent = False
                after = event.id or after
                yield event
                if event.final:
                    return
        except TransientFault as fault:
            if silent and isinstance(fault, StreamEnded):
                if over:
                    return
                # If it is, ask once more: the final event may have been written since.
                over = _is_over(connection, job_id)
                if over:
                    continue
            backoff.pause(fault)


def _is_over(connection: Connection, job_id: str) -> bool:
    return connection.ask(JobView, "GET", f"/v1/jobs/{job_id}").state.final


def _one_connection(connection: Connection, job_id: str, after: str | None) -> Iterator[JobEvent]:
    """Give the events of one connection, up to the box's last.

    Raises:
        StreamEnded: the box ended the stream.
    """
    # Compressed by a proxy, events would come together, at the end.
    headers = {
        "Accept": "text/event-stream",
        "Accept-Encoding": "identity",
        "Cache-Control": "no-store",
    }
    if after is not None:
        headers["Last-Event-ID"] = after
    path = f"/v1/jobs/{job_id}/events"
    with connection.stream("GET", path, headers=headers, timeout_s=SILENCE_S) as answer:
        yield from read_events(answer.iter_bytes())
    raise StreamEnded(f"the events of job {job_id} at {connection.url} ended before the job did")


def read_events(chunks: Iterable[bytes]) -> Iterator[JobEvent]:
    """Read a stream's bytes as events; kinds that this version does not know are left out.

    Raises:
        ProtocolError: an event's data are not what docs/wire.md says.
    """
    # httpx-sse reads the text of a response, whatever that is of; it sees each chunk as it comes.
    stream = httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=chunks)
    for sent in EventSource(stream).iter_sse():
        event = _read(sent)
        if event is not None:
            yield event


def _read(sent: ServerSentEvent) -> JobEvent | None:
    """Read one event; None for a kind that this version does not know, or without data."""
    if not sent.data:
        return None
    try:
        if sent.event == "state":
            return JobEvent(sent.id, "state", job=JobView.model_validate_json(sent.data))
        if sent.event == "progress":
            progress = ProgressView.model_validate_json(sent.data)
            return JobEvent(sent.id, "progress", progress=progress)
    except ValidationError as error:
        raise ProtocolError(
            f"expected a {sent.event} event as docs/wire.md has it, got {sent.data[:200]!r} "
            f"({error}); is this client older or newer than the box?"
        ) from None
    return None
