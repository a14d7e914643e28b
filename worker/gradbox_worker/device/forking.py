"""The template: imports what devices need, and forks a device process for each request.

A fork copies the thread that forks and the memory of all; what other threads were doing stays half
done in the copy, and so does what a driver keeps of the process. Therefore the template runs
nothing: it computes on no tensor, builds no model, runs no file of the owner's and opens no device.
Importing starts no thread, except that NumPy's and SciPy's OpenBLAS have theirs from the moment
they are loaded, unless they may have one only (torch's own has none before it computes). Before
each fork the template looks whether that holds, and says so if it does not; then the worker starts
its devices afresh. CUDA can be used in the copy as long as the driver was not opened before.

It forks twice: the device's parent ends at once, and the worker, which asked to have the orphans
below it, becomes its parent. The device says itself that it is there, so nothing depends on the
template's life but the next fork. What a fork would leave the same in all copies is made anew: the
mark by which `descendants` finds what a device has started, and NumPy's random state (Python draws
its own anew, torch begins with a fixed one). Objects that were there before are left out of garbage
collection, which would write to all of them and so copy their memory.

multiprocessing's fork server is not used: it pickles what it passes on, stays the parent of what it
forks, and knows no reason not to fork.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from gradbox_worker.device.descendants import MARK
from gradbox_worker.device.messages import Forked, Unforked, send
from gradbox_worker.device.template import NO_MARK

# A worker that has just started runs its first jobs before that.
QUIET_S: Final = 3.0
PAUSE_S: Final = 0.001
TASKS: Final = Path("/proc/self/task")
OPEN_FILES: Final = Path("/proc/self/fd")
# Of NVIDIA's driver, AMD's, and that of Windows beneath Linux.
DRIVERS: Final = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/dxg")


def forked_device(requests: socket.socket, *, import_more: Callable[[], object]) -> Connection:
    """Fork on request. Returns in each device process its pipe; the template never returns.

    Args:
        import_more: called when nobody has asked for a device for a while: a first device, which is
            waited for, imports that itself once it is ready.
    """
    gc.freeze()
    imported_more = False
    while True:
        asked, _, _ = select.select([requests], [], [], None if imported_more else QUIET_S)
        if asked:
            connection = _fork_on_request(requests)
            if connection is not None:
                requests.close()
                return connection
        else:
            import_more()
            gc.freeze()
            imported_more = True


def why_not_to_fork() -> str | None:
    """Return what would be broken in a copy of this process; None if nothing would."""
    import torch

    num_threads = len(list(TASKS.iterdir()))
    if num_threads != 1:
        return f"it has {num_threads} threads, where it should have one"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "it has initialised CUDA"
    for link in OPEN_FILES.iterdir():
        try:
            opened = os.readlink(link)
        except FileNotFoundError:  # the folder itself, while it was listed
            continue
        if opened.startswith(DRIVERS):
            return f"it has opened {opened}"
    return None


def _fork_on_request(requests: socket.socket) -> Connection | None:
    """Wait for a request and fork; returns the pipe in the device process, None in the template."""
    mark, files, _, _ = socket.recv_fds(requests, len(NO_MARK), 2, socket.MSG_CMSG_CLOEXEC)
    if not mark:
        os._exit(0)  # the worker needs no more devices, or is gone
    connection_fd, output_fd = files
    connection = Connection(connection_fd)
    reason = why_not_to_fork()
    if reason is None:
        sys.stdout.flush()
        sys.stderr.flush()
        if _forked_twice():
            _leave_template(mark, output_fd=output_fd)
            with suppress(OSError):  # the worker is gone, as the wait for its first message finds
                send(connection, Forked(pid=os.getpid()))
            return connection
    os.close(output_fd)
    with connection, suppress(OSError):  # the worker may not wait for it any more
        if reason is not None:
            send(connection, Unforked(reason=reason))
    return None


def _forked_twice() -> bool:
    """Fork a process that leads a session; returns true in it, once it has lost its parent.

    Returns:
        False in the process that was there before.
    """
    between = os.fork()
    if between > 0:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    try:
        if os.fork() > 0:
            os._exit(0)
    except OSError:
        os._exit(1)
    os.setsid()
    while os.getppid() == between:
        time.sleep(PAUSE_S)
    return True


def _leave_template(mark: bytes, *, output_fd: int) -> None:
    """Give this process its own output, mark and random state instead of the template's."""
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    # What /proc shows as the environment is the memory where the program found it: the template's,
    # copied. Setting a variable only changes what this process, and what it starts, will read.
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    ctypes.memmove(getenv(MARK.encode()), mark, len(NO_MARK))
    os.environ[MARK] = mark.decode()

    import numpy

    numpy.random.seed()
