"""The worker's side of its template: the process that has imported torch and forks its devices."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from gradbox_worker.device.descendants import MARK
from gradbox_worker.device.exits import Exit, exit_of
from gradbox_worker.device.output import BoundedLog, Output

# As long as every mark, since a device process writes its own over it.
NO_MARK: Final = "0" * 32
LEAVE_S: Final = 1.0  # what waits for requests ends at once; what still imports has nothing to lose


class Template:
    """A process that runs `gradbox_worker.device.main --template`."""

    def __init__(self, options: Sequence[str], *, log: BoundedLog | None = None) -> None:
        """Start it; it takes requests at once, and answers them when it has imported.

        Args:
            options: what its devices are started with.
            log: where what it prints goes; None: the worker's standard error.
        """
        # One message a request, with the files that it is about.
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "gradbox_worker.device.main", "--template"]
        command += ["--fd", str(theirs.fileno()), "--parent", str(os.getpid()), *options]
        output = None if log is None else Output(log)
        printed = 2 if output is None else output.write_fd
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                env=os.environ | {MARK: NO_MARK},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C on the terminal is the worker's business
            )
        if output is not None:
            output.begin()

    @property
    def pid(self) -> int | None:
        """The process, or None if it has ended."""
        return None if self._process.poll() is not None else self._process.pid

    def ask_for_device(self, mark: str, *, connection_fd: int, output_fd: int) -> None:
        """Ask for a device process; its pipe says `Forked` or `Unforked`, or ends.

        Args:
            mark: the value of `MARK` in its environment.
            connection_fd: its end of the pipe; it gets a copy.
            output_fd: its standard output and standard error, likewise.

        Raises:
            OSError: the template is gone.
        """
        socket.send_fds(self._requests, [mark.encode()], [connection_fd, output_fd])

    def end(self) -> Exit:
        """End the process, and return how it ended."""
        self._requests.close()
        try:
            return exit_of(self._process.wait(LEAVE_S))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return exit_of(self._process.wait())
