"""What a job would take: asked of the box before the job is submitted."""

from __future__ import annotations

from collections.abc import Callable

from gradbox.computations import Computation
from gradbox.errors import NeedsBox, ProtocolError
from gradbox.html import card, size
from gradbox.http.connection import Connection
from gradbox.http.posting import Answered
from gradbox.job import QUICK_S, Job
from gradbox.protocol import BoxView, EstimateView, JobState
from gradbox.submitting import Submitter


class Estimate(EstimateView):
    """What a job would take, as a few of its shards have shown; its `repr` says it in words.

        estimate = client.estimate(computation)
        if estimate.fits:
            job = client.submit(computation)

    Attributes:
        queue_position: where a job that is submitted now would wait, 1 for the next one; 0: it
            would begin at once.
        waits_s: about how long; None if nobody can say.
        hold: why no waiting job is handed to a device now, if none is.
    """

    queue_position: int
    waits_s: float | None
    hold: str | None = None

    def __repr__(self) -> str:
        return "\n".join([self._title, *(f"  {name:<8}{said}" for name, said in self._said())])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return card(self._title, self._said())

    @property
    def _title(self) -> str:
        return f"<Estimate: {'fits' if self.fits else 'does not fit'} {self.device}>"

    def _said(self) -> list[tuple[str, str]]:
        graphs = "" if self.seconds is not None else " or more"
        if self.shards_retained:
            number = self.shards_retained
            graphs = (
                f" with one graph at a time, {size(self.peak_retained_bytes)} with those of "
                f"{number} shard{'' if number == 1 else 's'}"
            )
        known = f"{size(self.result_bytes)} of result" if self.seconds is not None else ""
        said = [
            ("memory", f"{size(self.peak_bytes)}{graphs}, of {size(self.most_bytes)} there are"),
            ("time", "" if self.seconds is None else f"{self.seconds:.3g} s on the device"),
            ("bytes", ", ".join(filter(None, [f"{size(self.upload_bytes)} up", known]))),
            ("wait", self._said_wait()),
            ("advice", self.advice),
        ]
        return [(name, text) for name, text in said if text]

    def _said_wait(self) -> str:
        if self.hold is not None:
            return f"no job begins for now: the box is {self.hold}"
        if self.queue_position == 0:
            return "none: it would begin at once"
        about = "" if self.waits_s is None else f", about {self.waits_s:.0f} s"
        return f"place {self.queue_position} in the queue{about}"


def ask(
    computation: Computation,
    *,
    connection: Connection,
    submitter: Submitter,
    handle: Callable[[Answered], Job],
    progress: bool | None,
) -> Estimate:
    """Have a box measure a computation; see `GradClient.estimate`."""
    answered = submitter.submit(computation, progress=progress, wait_s=QUICK_S, estimate=True)
    found = handle(answered).result(progress=progress).manifest.estimate
    if found is None:
        raise ProtocolError("expected an estimate, got none: is the box older than this client?")
    try:
        place, waits_s, hold = _wait(connection.ask(BoxView, "GET", "/v1/box"))
    except NeedsBox:  # jobs run in this process, at once
        place, waits_s, hold = 0, 0.0, None
    return Estimate(**vars(found), queue_position=place, waits_s=waits_s, hold=hold)


def _wait(box: BoxView) -> tuple[int, float | None, str | None]:
    """Return where a job that is submitted now waits, how long, and what holds all jobs."""
    hold = box.operation.hold
    if any(device.state == "idle" for device in box.devices) and not box.num_queued:
        return 0, 0.0, hold
    begins = [job.begins_s for job in box.jobs if job.state is JobState.QUEUED]
    if begins:
        known = [begin_s for begin_s in begins if begin_s is not None]
        waits_s = max(0.0, max(known) - box.now_s) if len(known) == len(begins) else None
    else:
        running = [job.progress for job in box.jobs if job.progress is not None]
        left = [progress.seconds_left for progress in running if progress.seconds_left is not None]
        waits_s = min(left, default=None)
    return box.num_queued + 1, waits_s, hold
