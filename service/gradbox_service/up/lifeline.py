"""Children that do not outlive the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """Return a `preexec_fn` after which the kernel signals the child when its parent dies.

    The parent is the thread that starts the child, so that must be the main thread. Only Linux has
    this; elsewhere the result is None, and what `kill -9` of the parent leaves is stopped when the
    next one starts on the same data.
    """
    if sys.platform != "linux":
        return None
    # Looked up before the fork: the child may not take the locks that loading a library takes.
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it died between the fork and the line above
            os.kill(os.getpid(), number)

    return arrange
