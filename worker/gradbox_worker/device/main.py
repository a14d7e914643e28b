"""The device process: keeps the models loaded and runs the jobs that the worker sends.

Started by `gradbox_worker.device.child`, as `python -m gradbox_worker.device.main` or by a fork of
the template, which is this program with `--template`; /proc and `ps` tell them apart by their
names. It never talks to Redis and never outlives its worker. A second thread reads the pipe, so
that a request to stop is heard while a job runs; it only sets a flag, which the engine's observer
looks at before each shard.
"""

from __future__ import annotations

import argparse
import importlib
import os
import queue
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Protocol

from gradbox.printable import log_to_stderr
from gradbox_worker.device.child import SETTINGS, DeviceSettings
from gradbox_worker.device.messages import Begin, Run, Stop, receive_order
from gradbox_worker.device.parentage import end_with_parent
from gradbox_worker.work import Work

# What the kernel calls the process, in /proc/PID/comm: at most 15 characters.
TEMPLATE_NAME: Final = "gradbox-templ"
DEVICE_NAME: Final = "gradbox-device"


class Inbox:
    """What the worker sends, read by a thread of its own; the process ends when the worker does."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._runs: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._stopped: tuple[str, int] | None = None
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def next_run(self, within_s: float | None) -> Work | None:
        """Wait for the next job, not longer than `within_s`; None if there is none by then."""
        try:
            return self._runs.get(timeout=within_s)
        except queue.Empty:
            return None

    def stop_requested(self, job_id: str, attempt: int) -> bool:
        """Return whether this attempt is to stop."""
        return self._stopped == (job_id, attempt)

    def _read(self) -> None:
        while True:
            try:
                order = receive_order(self._connection)
            except (EOFError, OSError):
                os._exit(0)
            match order:
                case Run():
                    self._runs.put(order.work)
                case Stop():
                    self._stopped = (order.job_id, order.attempt)


class Serve(Protocol):
    """What a process does once torch is imported: `serving.serve`, or that of a cluster."""

    def __call__(
        self, connection: Connection, orders: Inbox, *, begin: Begin, settings: DeviceSettings
    ) -> None: ...


def main(arguments: list[str], *, serving: str = "gradbox_worker.device.serving") -> None:
    """Serve jobs until the worker closes the pipe; as a template, fork what does.

    Args:
        serving: the module whose `serve` does that.
    """
    options = _parser().parse_args(arguments)
    log_to_stderr("device[%(process)d] ")
    connection = _fork_devices(options) if options.template else Connection(options.fd)
    _set_process_name(DEVICE_NAME)
    try:
        begin = receive_order(connection)
    except (EOFError, OSError):
        sys.exit("the worker that started this device process is gone")
    assert isinstance(begin, Begin)
    # Only now: a process that was forked had another parent at first.
    _end_with_worker(options.parent)
    inbox = Inbox(connection)
    # Only now: torch takes seconds to import, and the worker may be gone by then.
    serve: Serve = importlib.import_module(serving).serve

    serve(connection, inbox, begin=begin, settings=options.settings)


def _fork_devices(options: argparse.Namespace) -> Connection:
    """Be the template; returns in each device process that was forked, with its pipe."""
    _end_with_worker(options.parent)
    from gradbox_worker.device.forking import forked_device
    from gradbox_worker.device.importing import import_for_devices, import_for_jobs

    import_for_devices(options.settings.models_file)
    _set_process_name(TEMPLATE_NAME)  # from here on a fork takes milliseconds
    requests = socket.socket(fileno=options.fd)
    return forked_device(requests, import_more=import_for_jobs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gradbox_worker.device.main")
    parser.add_argument("--template", action="store_true")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--settings", type=SETTINGS.validate_json, required=True)
    return parser


def _end_with_worker(pid: int) -> None:
    """End with the worker, and only with it: a Ctrl-C or a SIGTERM is the worker's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(pid)


def _set_process_name(name: str) -> None:
    if sys.platform == "linux":  # prctl would name the calling thread
        Path("/proc/self/comm").write_text(name)


if __name__ == "__main__":
    main(sys.argv[1:])
