"""What `gradbox up` says of itself, on standard error."""

from __future__ import annotations

import os
import stat
import sys
import time
from typing import Final

# How often it is said what a box that is not ready waits for.
WAITS_S: Final = 5.0


class NotReady:
    """Says now and then what is waited for, since this was made."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._next_s = self._began_s + WAITS_S

    def because(self, what: str) -> None:
        """Say what is waited for, if that is due."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + WAITS_S
            say(f"not ready yet, after {now_s - self._began_s:.0f} s: {what}")


def say(text: str) -> None:
    """Write lines, each with its end in one write: `demo` and others print to the same terminal.

    In a file each says when; a journal notes that by itself, and whoever sits before a terminal
    knows.
    """
    in_file = stat.S_ISREG(os.fstat(2).st_mode)
    when = time.strftime("%Y-%m-%d %H:%M:%S ") if in_file else ""
    for line in text.split("\n"):
        print(f"{when}gradbox up: {line}\n", end="", file=sys.stderr, flush=True)
