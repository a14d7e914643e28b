"""The device process: keeps the models loaded and runs the jobs that the worker sends.

Started by `gradbox_worker.device.process` as `python -m gradbox_worker.device.main`. It imports
torch, and waits for its first message: until then it is a spare, and /proc and `ps` call it so. It
never talks to Redis and never outlives its worker. A second thread reads the pipe, so that a
request to stop is heard while a job runs; it only sets a flag, which the engine's observer looks at
before each shard.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Protocol

from gradbox.printable import log_to_stderr
from gradbox_worker.device.child import DeviceSettings
from gradbox_worker.device.messages import Begin, Run, Stop, receive_order

PR_SET_PDEATHSIG: Final = 1
# What the kernel calls the process, in /proc/PID/comm: at most 15 characters.
SPARE_NAME: Final = "gradbox-spare"
DEVICE_NAME: Final = "gradbox-device"


class Inbox:
    """What the worker sends, read by a thread of its own; the process ends when the worker does."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._begins: queue.SimpleQueue[Begin] = queue.SimpleQueue()
        self._runs: queue.SimpleQueue[Run] = queue.SimpleQueue()
        self._stopped: tuple[str, int] | None = None
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    @property
    def begun(self) -> bool:
        """Whether the first message has been received."""
        return not self._begins.empty()

    def begin(self) -> Begin:
        """Wait for the first message."""
        return self._begins.get()

    def next_run(self, within_s: float | None) -> Run | None:
        """Wait for the next job, not longer than `within_s`; None if there is none by then."""
        try:
            return self._runs.get(timeout=within_s)
        except queue.Empty:
            return None

    def stop_requested(self, job_id: str, attempt: int) -> bool:
        """Tell whether this attempt is to stop."""
        return self._stopped == (job_id, attempt)

    def _read(self) -> None:
        while True:
            try:
                order = receive_order(self._connection)
            except (EOFError, OSError):
                os._exit(0)
            match order:
                case Begin():
                    _be_called(DEVICE_NAME)
                    self._begins.put(order)
                case Run():
                    self._runs.put(order)
                case Stop():
                    self._stopped = (order.job_id, order.attempt)


class Serve(Protocol):
    """What a process does once torch is imported: `serving.serve`, or that of a cluster."""

    def __call__(
        self, connection: Connection, orders: Inbox, *, begin: Begin, settings: DeviceSettings
    ) -> None: ...


def main(arguments: list[str], *, serving: str = "gradbox_worker.device.serving") -> None:
    """Serve jobs until the worker closes the pipe.

    Args:
        serving: the module whose `serve` does that.
    """
    options = _parser().parse_args(arguments)
    _bind_to_parent(options.parent)
    _be_called(SPARE_NAME)
    log_to_stderr("device[%(process)d] ")
    connection = Connection(options.fd)
    inbox = Inbox(connection)
    # Only now: torch takes seconds to import, and the worker may be gone by then.
    from gradbox_worker.device.importing import import_ahead

    serve: Serve = importlib.import_module(serving).serve

    if not inbox.begun:  # else somebody waits for this process
        import_ahead(options.models)
    serve(
        connection,
        inbox,
        begin=inbox.begin(),
        settings=DeviceSettings(
            models_file=options.models,
            data=options.data,
            device=options.device,
            model_memory_bytes=options.model_memory_bytes,
            result_memory_bytes=options.result_memory_bytes,
            job_memory_bytes=options.job_memory_bytes,
            checkpoint_after_s=options.checkpoint_after_s,
            cluster=options.cluster,
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gradbox_worker.device.main")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--model-memory-bytes", type=int)
    parser.add_argument("--result-memory-bytes", type=int)
    parser.add_argument("--job-memory-bytes", type=int)
    parser.add_argument("--checkpoint-after-s", type=float)
    parser.add_argument("--cluster", type=Path)
    return parser


def _bind_to_parent(parent_pid: int) -> None:
    """End with the worker, and only with it: a Ctrl-C or a SIGTERM is the worker's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_pid:
        sys.exit("the worker that started this device process is gone")


def _be_called(name: str) -> None:
    if sys.platform == "linux":  # prctl would name the calling thread
        Path("/proc/self/comm").write_text(name)


if __name__ == "__main__":
    main(sys.argv[1:])
