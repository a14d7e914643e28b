"""Devices and queue of a box as rows of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gradbox.cli.output import SHOWN_LENGTH
from gradbox.cli.times import duration
from gradbox.http.connection import Connection, parsed
from gradbox.protocol import BoxJob, BoxView, DeviceView, JobState, OperationMode, OperationView

GIB: Final = 2**30
BARS: Final = "▁▂▃▄▅▆▇█"
# The last hour is drawn in so many bars.
NUM_BARS: Final = 12
DEVICE_TITLES: Final = ("WORKER", "DEVICE", "STATE", "JOB", "BUSY, LAST HOUR", "MEMORY, GiB", "UP")
JOB_TITLES: Final = ("#", "ID", "OWNER", "MODEL", "COMPUTATION", "STATE", "AGE", "PROGRESS")

Row = tuple[str, ...]


def read_box(connection: Connection) -> tuple[BoxView, OperationView]:
    """Return the box now, and the mode of operation that it is in."""
    box = parsed(BoxView, connection.request("GET", "/v1/box"))
    return box, parsed(OperationView, connection.request("GET", "/v1/operation"))


def headline(box: BoxView, operation: OperationView, *, url: str) -> str:
    """Return the box in one line."""
    mode = "" if operation.mode is OperationMode.RUNNING else f" · {operation}"
    counts = f"{box.num_running} running, {box.num_queued} waiting"
    return f"{url} · gradbox {box.gradbox} · {counts}{mode}"


def device_rows(box: BoxView) -> list[Row]:
    """Return titles and a row for every worker."""
    jobs = {job.key: job for job in box.jobs}
    return [
        DEVICE_TITLES,
        *(_device_row(d, jobs.get(d.job or ""), now_s=box.now_s) for d in box.devices),
    ]


def job_rows(box: BoxView, *, most: int | None = None) -> list[Row]:
    """Return titles and a row for every job that runs or waits, at most so many."""
    return [JOB_TITLES, *(_job_row(job, now_s=box.now_s) for job in box.jobs[:most])]


def _device_row(device: DeviceView, job: BoxJob | None, *, now_s: float) -> Row:
    name = f"{device.device} {device.hardware}".strip()
    held = "" if job is None else f"{job.model} of {job.owner}, {_progress(job)}".rstrip(", ")
    busy = f"{_spark(device.busy)} {device.busy_share:4.0%}"
    memory = ""
    if device.memory is not None:
        memory = f"{device.memory.used_bytes / GIB:.1f} of {device.memory.total_bytes / GIB:.1f}"
    up = duration(now_s - device.started_s)
    return (device.worker, name, device.state, held, busy, memory, up)


def _job_row(job: BoxJob, *, now_s: float) -> Row:
    place = "" if job.position is None else str(job.position)
    shown_id = "" if job.id is None else job.id[:SHOWN_LENGTH]
    age = duration(now_s - job.created_s)
    state = job.state.value
    return (place, shown_id, job.owner, job.model, job.computation, state, age, _progress(job))


def _progress(job: BoxJob) -> str:
    if job.progress is None or job.state is not JobState.RUNNING:
        return ""
    left = job.progress.seconds_left
    soon = "" if left is None else f", {duration(left)} left"
    return f"{job.progress.phase} {job.progress.done}/{job.progress.total}{soon}"


def _spark(percents: Sequence[int]) -> str:
    """Return a bar for every few minutes."""
    width = max(1, len(percents) // NUM_BARS)
    means = [
        sum(percents[i : i + width]) / len(percents[i : i + width])
        for i in range(0, len(percents), width)
    ]
    return "".join(BARS[min(len(BARS) - 1, int(mean / 100 * len(BARS)))] for mean in means)
