"""The two signals by which a worker speaks to its device process.

    SIGUSR1    look whether the job is to stop: at its record, and at whether this process leaves
    SIGUSR2    take no more turns: end after this job

Both together end the process warmly: its job is stopped before the next shard and queued again. A
signal only sets a flag here, and the device itself looks at the job that it runs by then, so none
can stop the wrong one.
"""

from __future__ import annotations

import signal
from typing import Final

LOOK: Final = signal.SIGUSR1
LAST: Final = signal.SIGUSR2


class Orders:
    """What the device process has been asked.

    Attributes:
        look: whether to look if the job is to stop; whoever looks sets it back.
        last: whether to take no more turns.
        leaving: whether the job that runs is to be given back.
    """

    def __init__(self) -> None:
        self.look = False
        self.last = False
        self.leaving = False

    def listen(self) -> None:
        """Hear the signals, in the main thread, and leave those of a terminal to the worker."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(LOOK, lambda *_: self.ask_to_look())
        signal.signal(LAST, lambda *_: self.ask_for_end())

    def ask_to_look(self) -> None:
        """Ask that the device look whether its job is to stop."""
        self.look = True
        self.leaving = self.leaving or self.last

    def ask_for_end(self) -> None:
        """Ask that it take no more turns."""
        self.last = True
