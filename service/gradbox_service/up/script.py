"""`gradbox up --exec`: a command that runs while the box is up, as in a job script."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Final

from gradbox_service.up.lifeline import die_with_parent

STOP_S: Final = 10.0
# What a shell returns for a process that a signal ended.
SIGNALLED: Final = 128


class Script:
    """A shell command that finds the box by its environment. It shares the terminal with `up`.

    Its files are its user's: it has the umask that `up` was started with.
    """

    def __init__(self, command: str, *, umask: int = -1) -> None:
        self.command = command
        self._umask = umask
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, url: str, token: str, data: Path) -> None:
        """Run it with GRADBOX_URL, GRADBOX_TOKEN and GRADBOX_DATA set."""
        box = {"GRADBOX_URL": url, "GRADBOX_TOKEN": token, "GRADBOX_DATA": str(data)}
        self._process = subprocess.Popen(
            self.command,
            shell=True,
            env={**os.environ, **box},
            umask=self._umask,
            preexec_fn=die_with_parent(signal.SIGTERM),
        )

    def exit_code(self) -> int | None:
        """Return how it ended, as a shell says it; None while it runs or before it was started."""
        code = None if self._process is None else self._process.poll()
        return code if code is None or code >= 0 else SIGNALLED - code

    def stop(self) -> int:
        """End it, if it runs, and return its exit code; 0 if it was never started."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        return self.exit_code() or 0
