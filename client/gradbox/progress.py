"""A job's progress on one line: phase, shards or MiB, time left.

On a terminal it is text, in a notebook a widget. Without ipywidgets a notebook shows the text, too.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from gradbox.http.download import OnBytes
from gradbox.http.events import JobEvent
from gradbox.printable import printable
from gradbox.protocol import JobState, JobView, ProgressView

if TYPE_CHECKING:
    from tqdm import tqdm

MIB: Final = 2**20
# A smaller transfer is over before a bar could be read.
SHOWN_BYTES: Final = 16 * MIB
# Between two drawings of one phase.
BETWEEN_S: Final = 0.1
# After this long a transfer's rate is known well enough to tell the time left.
RATE_AFTER_S: Final = 1.0
FORMAT: Final = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
STEPS_FORMAT: Final = "{desc}: step {n_fmt}, {rate_fmt}{postfix}"


class ProgressBar:
    """Shows a job's events, or a transfer's bytes, on one line.

    Args:
        title: what the line begins with.
        shown: True and False decide; None shows it on a terminal and in a notebook.
    """

    def __init__(self, title: str, *, shown: bool | None = None) -> None:
        self._title = printable(title)
        self.is_shown = sys.stderr.isatty() or in_notebook() if shown is None else shown
        self._bar: tqdm[Any] | None = None
        self._phase = ""
        self._drawn_s = 0.0
        # Where and when the transfer of this phase began.
        self._began = (0, 0.0)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, event: JobEvent) -> None:
        """Show what an event says."""
        if event.progress is not None:
            self._show_progress(event.progress)
        elif event.job is not None:
            self._show_state(event.job)

    def show_view(self, view: JobView) -> None:
        """Show what the box says of a job: its progress while it runs, else its state."""
        if view.state is JobState.RUNNING and view.progress is not None:
            self._show_progress(view.progress)
        else:
            self._show_state(view)

    def show_download(self, have: int, total: int) -> None:
        """Show how much of a file is here, unless the file is small."""
        self._show_bytes("fetching, MiB", have, total)

    def show_upload(self, have: int, total: int) -> None:
        """Show how much of a job's inputs is on the box, unless they are small."""
        self._show_bytes("uploading, MiB", have, total)

    def show_jobs(self, done: int, total: int) -> None:
        """Show how many of several jobs are done."""
        self._draw("jobs", done, total)

    def _show_bytes(self, phase: str, have: int, total: int) -> None:
        if total < SHOWN_BYTES:
            return
        now = time.monotonic()
        if phase != self._phase:
            self._began = (have, now)
        before, began_s = self._began
        left = ""
        if now - began_s > RATE_AFTER_S and have > before:
            left = _left((total - have) * (now - began_s) / (have - before))
        self._draw(phase, have // MIB, total // MIB, left)

    def _show_progress(self, progress: ProgressView) -> None:
        left = "" if progress.seconds_left is None else _left(progress.seconds_left)
        self._draw(progress.phase, progress.done, progress.total, left)

    def _show_state(self, job: JobView) -> None:
        text = state_and_place(job)
        if job.state is JobState.DONE:
            total = max(int(self._bar.total or 1) if self._bar is not None else 1, 1)
            self._draw(text, total, total)
        else:
            self._draw(text, 0, 1, begins_in(job))

    def _draw(self, phase: str, done: int, total: int, left: str = "") -> None:
        now = time.monotonic()
        is_recent = phase == self._phase and done < total and now - self._drawn_s < BETWEEN_S
        if is_recent or not self.is_shown:
            return
        self._phase, self._drawn_s = phase, now
        text = f"{self._title}: {printable(phase)}"
        if self._bar is None:
            self._bar = _new_bar(text, total)
        if self._bar.total != total:
            began_s = self._bar.start_t
            self._bar.reset(total)  # a widget learns its total in no other way
            self._bar.start_t = began_s
        self._bar.set_description_str(text, refresh=False)
        self._bar.set_postfix_str(left, refresh=False)
        self._bar.n = done
        self._bar.refresh()


class StepsLine(ProgressBar):
    """Shows the steps of a run on one line: how many, how many a second, the loss, the job.

    The line is there while a step is made, and cleared when it is done: what a loop prints between
    its steps has the lines to itself.
    """

    def __init__(self, title: str, *, shown: bool | None = None, done: int = 0) -> None:
        super().__init__(title, shown=shown)
        self._done = done
        self._loss = ""

    def __enter__(self) -> StepsLine:
        self._draw("", 0, 1)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.clear()

    def step(self, number: int, loss: float | None) -> None:
        """Count a step that was made."""
        self._loss = "" if loss is None else f"loss {loss:.4g}"
        self._done = number
        if self._bar is not None:
            self._bar.set_postfix_str(self._loss, refresh=False)
            self._bar.update(number - self._bar.n)

    def _draw(self, phase: str, done: int, total: int, left: str = "") -> None:
        if not self.is_shown:
            return
        if self._bar is None:
            self._bar = _new_bar(self._title, None, bar_format=STEPS_FORMAT, initial=self._done)
        job = f"{phase} {done}/{total}" if total > 1 else phase
        parts = filter(None, (self._loss, printable(job), left))
        self._bar.set_postfix_str(", ".join(parts), refresh=False)
        self._bar.refresh()


@contextmanager
def downloading(
    title: str, *, shown: bool | None, stop: threading.Event | None = None
) -> Iterator[OnBytes]:
    """Give what `download` calls with its bytes: it shows them, and ends the download on `stop`.

    Raises, from the download:
        concurrent.futures.CancelledError: `stop` was set.
    """
    with ProgressBar(title, shown=shown) as bar:

        def on_bytes(have: int, total: int) -> None:
            if stop is not None and stop.is_set():
                raise CancelledError
            bar.show_download(have, total)

        yield on_bytes


def state_and_place(view: JobView) -> str:
    """Say a job's state and, of one that waits, what for: "queued, position 3, after 2 of ann"."""
    if view.state is not JobState.QUEUED:
        return view.state.value
    parts = [view.state.value]
    if view.queue_position is not None:
        parts.append(f"position {view.queue_position}")
    if view.hold is not None:
        parts.append(f"the box is {view.hold}")
    elif owners := view.waits_for():
        parts.append(f"after {owners}")
    return ", ".join(parts)


def begins_in(view: JobView) -> str:
    """Say when a job that waits begins, about; "" if the box has not guessed."""
    if view.state is not JobState.QUEUED or view.seconds_left is None:
        return ""
    return f"begins in {_about(view.seconds_left)}"


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def _new_bar(
    text: str, total: int | None, *, bar_format: str = FORMAT, initial: int = 0
) -> tqdm[Any]:
    with warnings.catch_warnings():
        # It warns of missing widgets; the text is as good.
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    return tqdm(
        desc=text,
        total=total,
        bar_format=bar_format,
        initial=initial,
        unit=" step",
        file=sys.stderr,
    )


def _left(seconds: float) -> str:
    return f"{_about(seconds)} left"


def _about(seconds: float) -> str:
    """Say how long something takes, in words that are as exact as the estimate."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
