"""The device process: keeps the models loaded, takes turns, and computes them.

Started by `gradbox_worker.device.process` as `python -m gradbox_worker.turns.main`, with what it is
to do as JSON on its standard input. It never outlives its worker, which watches it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Final

from gradbox.printable import log_to_stderr
from gradbox_worker.device.orders import Orders
from gradbox_worker.device.settings import START

# What the kernel calls the process, in /proc/PID/comm: at most 15 characters.
DEVICE_NAME: Final = "gradbox-device"
PR_SET_PDEATHSIG: Final = 1  # prctl(2)


def main() -> None:
    """Serve jobs until told to end."""
    log_to_stderr("device[%(process)d] ")
    orders = Orders()
    orders.listen()
    start = START.validate_json(sys.stdin.buffer.read())
    _end_with_parent(start.parent)
    _read_nothing_more()
    _set_process_name(DEVICE_NAME)
    # Only now: torch takes seconds to import, and the worker may be gone by then.
    from gradbox_worker.turns.serving import serve

    serve(start, orders)


def _end_with_parent(pid: int) -> None:
    """Have the kernel end this process when its parent ends.

    Raises:
        SystemExit: the parent is not `pid`: that one has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != pid:
        sys.exit("the worker that started this process is gone")


def _read_nothing_more() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _set_process_name(name: str) -> None:
    if sys.platform == "linux":  # prctl would name the calling thread
        Path("/proc/self/comm").write_text(name)


if __name__ == "__main__":
    main()
