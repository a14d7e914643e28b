"""`gradbox down`: stop the box that `gradbox up` runs on a data folder."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from gradbox.cli.output import say
from gradbox.errors import OwnerOnly, ServiceUnavailable
from gradbox.settings import DATA

LOCK: Final = "up.lock"
LOOK_S: Final = 0.05

DataFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="its data folder [GRADBOX_DATA, gradbox-data]")
]


def run(*, data: DataFolder = None) -> int:
    """Stop the box in order, and return once it has ended."""
    folder = data_folder(data)
    process = holder_of(folder)
    if process is None:
        raise ServiceUnavailable(
            f"expected a `gradbox up` that runs on {folder}, found none: name its folder with "
            f"--data, or stop it where it runs"
        )
    try:
        os.kill(process, signal.SIGTERM)
    except PermissionError:
        raise OwnerOnly(
            f"process {process} runs the box on {folder} as another user: ask that user to stop it"
        ) from None
    while holder_of(folder) == process:
        time.sleep(LOOK_S)
    say(f"stopped the box on {folder}")
    return 0


def data_folder(given: Path | None = None) -> Path:
    """Return the data folder of this machine's box: the one given, GRADBOX_DATA, ./gradbox-data."""
    return (given or Path(os.environ.get("GRADBOX_DATA") or DATA)).expanduser()


def holder_of(folder: Path) -> int | None:
    """Return the process of the `gradbox up` that runs on a data folder; None if there is none."""
    if sys.platform == "win32":  # no box runs there, and it has no flock
        return None
    import fcntl

    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(descriptor, 20).strip()
        return int(text) if text.isdigit() else None
    else:
        return None
    finally:
        os.close(descriptor)
