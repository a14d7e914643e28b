"""`gradbox top` and `gradbox workers`: devices and queue of the box, now or live."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gradbox.cli.output import (
    SHOWN_LENGTH,
    AsJson,
    coloured,
    duration,
    say,
    say_json,
    say_table,
    table_of,
)
from gradbox.http.connection import Connection
from gradbox.printable import printable
from gradbox.protocol import BoxJob, BoxView, DeviceView, JobState
from gradbox.settings import find_settings

if TYPE_CHECKING:
    from rich.console import Group


LINES_BESIDE_JOBS: Final = 7

Once = Annotated[bool, typer.Option("--once", help="print it once, as where no terminal is")]
Every = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.2, help="how often the box is asked")
]


def top(*, once: Once = False, every: Every = 1.0, json: AsJson = False) -> int:
    """Show devices and queue until `q` or Ctrl-C, or once."""
    # Ctrl-C is a way to leave it.
    with suppress(KeyboardInterrupt), closing(Connection(find_settings())) as connection:
        if json:
            say_json(read_box(connection).model_dump(mode="json"))
        elif once or not sys.stdout.isatty():
            _say_once(connection)
        else:
            _live(connection, every_s=every)
    return 0


def workers(*, json: AsJson = False) -> int:
    """Print a line for every worker."""
    with closing(Connection(find_settings())) as connection:
        box = read_box(connection)
    if json:
        say_json([device.model_dump(mode="json") for device in box.devices], indent=2)
    elif box.devices:
        say_table(device_rows(box))
    else:
        say("no workers")
    return 0


def _say_once(connection: Connection) -> None:
    box = read_box(connection)
    say(headline(box, url=connection.url))
    for rows in (device_rows(box, titles=NARROW_TITLES), job_rows(box)):
        if len(rows) > 1:
            say("")
            say_table(rows)


def _live(connection: Connection, *, every_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, no_color=not coloured(sys.stdout))
    with Live(console=console, screen=True, auto_refresh=False) as live, _keys() as pressed:
        while True:
            live.update(_picture(connection, height=console.height), refresh=True)
            if pressed(every_s) in ("q", "Q"):
                return


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Give what waits for a key so many seconds and returns it; "" if none was pressed."""

    def no_key(seconds: float) -> str:
        time.sleep(seconds)
        return ""

    if not sys.stdin.isatty() or os.name != "posix":
        yield no_key
        return
    import termios
    import tty

    keyboard = sys.stdin.fileno()

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([keyboard], [], [], seconds)
        return os.read(keyboard, 1).decode(errors="replace") if ready else ""

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _picture(connection: Connection, *, height: int) -> Group:
    from rich.console import Group
    from rich.text import Text

    box = read_box(connection)
    most = max(1, height - LINES_BESIDE_JOBS - len(box.devices))
    title = Text(printable(headline(box, url=connection.url), lines=True), style="bold")
    devices = table_of(device_rows(box, titles=NARROW_TITLES))
    return Group(title, "", devices, "", table_of(job_rows(box, most=most)))


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
    return connection.ask(BoxView, "GET", "/v1/box")


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
