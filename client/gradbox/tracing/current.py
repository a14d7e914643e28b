"""Which recording a thread makes, for what is replaced while a function is traced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gradbox.tracing.recording import Recording


class CurrentRecording(threading.local):
    """What this thread records now; None in one that does not trace."""

    recording: Recording | None = None

    @contextmanager
    def by(self, recording: Recording) -> Iterator[None]:
        """Have this thread make a recording."""
        before, self.recording = self.recording, recording
        try:
            yield
        finally:
            self.recording = before


TRACED: Final = CurrentRecording()
