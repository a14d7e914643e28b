"""The data folder of a box, which one `gradbox up` at a time may have."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from gradbox.errors import GradboxError


class DataInUse(GradboxError):
    """Another `gradbox up` keeps its data in this folder."""

    code = "data-in-use"
    title = "The data folder is in use"


def lock_folder(data: Path) -> int:
    """Take the lock of a data folder, which the kernel gives back when this process ends.

    Raises:
        DataInUse: another process holds it; the message names the process.
    """
    descriptor = os.open(data / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise DataInUse(
            f"another `gradbox up` (process {holder}) keeps its data in {data}: stop that one, or "
            f"give this one another folder with --data"
        ) from None
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
