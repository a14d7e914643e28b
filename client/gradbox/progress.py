"""A job's progress as a line on a terminal: phase, shards, seconds left."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from gradbox.http.events import JobEvent
from gradbox.printable import printable
from gradbox.protocol import JobState, JobView, ProgressView

if TYPE_CHECKING:
    from tqdm import tqdm

MIB: Final = 2**20
# A smaller file is fetched before a bar could be read.
SHOWN_BYTES: Final = 16 * MIB
# Between two drawings of one phase.
BETWEEN_S: Final = 0.1
FORMAT: Final = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class ProgressBar:
    """Shows a job's events on one line.

    Args:
        title: what the line begins with.
        shown: True and False decide; None shows it where stderr is a terminal.
    """

    def __init__(self, title: str, *, shown: bool | None = None) -> None:
        self._title = printable(title)
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._bar: tqdm[Any] | None = None
        self._phase = ""
        self._drawn_s = 0.0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, event: JobEvent) -> None:
        """Show what an event says."""
        if not self._shown:
            return
        if event.progress is not None:
            self._show_progress(event.progress)
        elif event.job is not None:
            self._show_state(event.job)

    def show_bytes(self, have: int, total: int) -> None:
        """Show how much of a file is here, unless it is there at once."""
        if self._shown and total >= SHOWN_BYTES:
            self._draw("fetching, MiB", have // MIB, total // MIB)

    def _show_progress(self, progress: ProgressView) -> None:
        left = ""
        if progress.seconds_left is not None:
            left = f"{progress.seconds_left:.0f} s left"
        self._draw(progress.phase, progress.done, progress.total, left)

    def _show_state(self, job: JobView) -> None:
        text = job.state.value
        if job.state is JobState.QUEUED and job.queue_position is not None:
            text += f", position {job.queue_position}"
        if job.state is JobState.DONE and self._bar is not None:
            self._draw(text, int(self._bar.total or 1), int(self._bar.total or 1))
        else:
            self._draw(text, 0, 1)

    def _draw(self, phase: str, done: int, total: int, left: str = "") -> None:
        from tqdm import tqdm

        now = time.monotonic()
        if phase == self._phase and done < total and now - self._drawn_s < BETWEEN_S:
            return
        self._phase, self._drawn_s = phase, now
        text = f"{self._title}: {printable(phase)}"
        if self._bar is None:
            self._bar = tqdm(desc=text, total=total, bar_format=FORMAT, file=sys.stderr)
        self._bar.set_description_str(text, refresh=False)
        self._bar.set_postfix_str(left, refresh=False)
        self._bar.total, self._bar.n = total, done
        self._bar.refresh()
