"""Devices and queue of a box as rows of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gradbox.cli.output import SHOWN_LENGTH, duration
from gradbox.http.connection import Connection, parsed
from gradbox.printable import printable
from gradbox.protocol import BoxJob, BoxView, DeviceView, JobState

GIB: Final = 2**30
BARS: Final = "▁▂▃▄▅▆▇█"
# The last hour is drawn in so many bars.
NUM_BARS: Final = 12
BUSY: Final = "BUSY, LAST HOUR"
MEMORY: Final = "MEMORY, GiB"
DEVICE_TITLES: Final = ("WORKER", "DEVICE", "STATE", "JOB", "PROGRESS", BUSY, MEMORY, "UP")
# Of these, what fits a hundred columns, beside a table of the jobs.
NARROW_TITLES: Final = ("WORKER", "STATE", "JOB", BUSY, MEMORY, "UP")
JOB_TITLES: Final = ("#", "ID", "OWNER", "MODEL", "COMPUTATION", "PROGRESS")

Row = tuple[str, ...]


def read_box(connection: Connection) -> BoxView:
    """Return the box now."""
    return parsed(BoxView, connection.request("GET", "/v1/box"))


def headline(box: BoxView, *, url: str) -> str:
    """Return the box in a line, and in another one why no job is handed to a worker."""
    counts = f"{box.num_running} running, {box.num_queued} waiting"
    held = "" if box.operation.hold is None else f"\nthe box is {printable(box.operation.hold)}"
    return f"{url} · gradbox {box.gradbox} · {counts}{held}"


def device_rows(box: BoxView, *, titles: Sequence[str] = DEVICE_TITLES) -> list[Row]:
    """Return titles, which choose the columns, and a row for every worker."""
    jobs = {job.key: job for job in box.jobs}
    cells = [_device_cells(device, jobs.get(device.job or ""), box) for device in box.devices]
    return [tuple(titles), *(tuple(found[title] for title in titles) for found in cells)]


def job_rows(box: BoxView, *, most: int | None = None) -> list[Row]:
    """Return titles and a row for every job that runs or waits, at most so many."""
    return [JOB_TITLES, *(_job_row(job, box) for job in box.jobs[:most])]


def _device_cells(device: DeviceView, job: BoxJob | None, box: BoxView) -> dict[str, str]:
    name = f"{device.device} {device.hardware}".strip()
    held = "" if job is None else f"{job.model} of {job.owner}"
    progress = "" if job is None else _progress(job, box)
    busy = f"{_spark(device.busy)} {device.busy_share:4.0%}"
    memory = ""
    if device.memory is not None:
        memory = f"{device.memory.used_bytes / GIB:.1f} of {device.memory.total_bytes / GIB:.1f}"
    up = duration(box.now_s - device.started_s)
    state: str = device.state
    if device.building is not None:
        for_s = duration(box.now_s - device.building.since_s)
        state = f"{state}, builds {device.building.model} for {for_s}"
    cells = (device.worker, name, state, held, progress, busy, memory, up)
    return dict(zip(DEVICE_TITLES, cells, strict=True))


def _job_row(job: BoxJob, box: BoxView) -> Row:
    place = "▸" if job.position is None else str(job.position)
    shown_id = "" if job.id is None else job.id[:SHOWN_LENGTH]
    return (place, shown_id, job.owner, job.model, job.computation, _progress(job, box))


def _progress(job: BoxJob, box: BoxView) -> str:
    if job.state is JobState.QUEUED:
        return f"since {duration(box.now_s - job.created_s)}{_begins(job, box)}"
    if job.progress is None:
        return "running"
    left = job.progress.seconds_left
    soon = "" if left is None else f", {duration(left)} left"
    return f"{job.progress.phase} {job.progress.done}/{job.progress.total}{soon}"


def _begins(job: BoxJob, box: BoxView) -> str:
    if box.operation.hold is not None:
        return f", the box is {box.operation.mode}"
    if job.begins_s is None:
        return ""
    left_s = job.begins_s - box.now_s
    return f", begins in about {duration(left_s)}" if left_s >= 1 else ", begins soon"


def _spark(percents: Sequence[int]) -> str:
    """Return a bar for every few minutes."""
    width = max(1, len(percents) // NUM_BARS)
    means = [
        sum(percents[i : i + width]) / len(percents[i : i + width])
        for i in range(0, len(percents), width)
    ]
    return "".join(BARS[min(len(BARS) - 1, int(mean / 100 * len(BARS)))] for mean in means)
