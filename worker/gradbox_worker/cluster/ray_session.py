"""Ray started on this machine, or joined; see `ray_environment` for what comes first."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray

from gradbox_worker.errors import DeviceNotStarted

REACH_S: Final = 5.0


@dataclass(frozen=True)
class RayOnThisMachine:
    """Where Ray is reached: its control service, and the socket of its process here."""

    address: str
    raylet: str

    def answers(self) -> bool:
        """Return whether Ray lives on this machine."""
        with socket.socket(socket.AF_UNIX) as asking:
            try:
                asking.connect(self.raylet)
            except OSError:
                return False
        return True


def start_here(*, folder: Path, num_cpus: int) -> RayOnThisMachine:
    """Start Ray on this machine; it ends with this process.

    Args:
        folder: for its files.
    """
    return _initialised(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        _temp_dir=str(folder),
    )


def check_address(address: str) -> None:
    """Check that something answers at the address of Ray's head, for Ray itself asks for minutes.

    Raises:
        DeviceNotStarted: it is no address, or nothing answers there.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise DeviceNotStarted(
            f"expected `local`, or the address of Ray's head as HOST:PORT, got {address!r}; "
            f"`ray start --head` prints it"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        raise DeviceNotStarted(
            f"expected Ray's head at {address}, where nothing answers: {error}; run `ray start` "
            f"on each machine first (docs/cluster.md)"
        ) from None


def join(address: str) -> RayOnThisMachine:
    """Join a cluster of which this machine is a node.

    Raises:
        DeviceNotStarted: there is none, this machine is no node of it, or the token is another.
    """
    try:
        return _initialised(address=address)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        raise DeviceNotStarted(
            f"expected a Ray cluster at {address} that this machine is a node of, got: {error}; "
            f"run `ray start` here first, with the token of the cluster (docs/cluster.md)"
        ) from error


def _initialised(**given: Any) -> RayOnThisMachine:
    """Initialise Ray, whose handlers of signals are not wanted."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        context = ray.init(log_to_driver=False, configure_logging=False, **given)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return RayOnThisMachine(
        address=str(context.address_info["gcs_address"]),
        raylet=str(context.address_info["raylet_socket_name"]),
    )


def leave() -> None:
    """End what was started here, or leave what was joined; the actors of this process end."""
    ray.shutdown()


def new_folder(data: Path) -> Path:
    """Return an empty folder for Ray's files, always the same for one data folder.

    Its path is short, since sockets lie in it, whose paths have at most 107 characters. What a Ray
    that was killed left there is removed.

    Raises:
        DeviceNotStarted: it belongs to somebody else.
    """
    folder = _folder(data)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise PermissionError("it belongs to another user")
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    except OSError as error:
        raise DeviceNotStarted(
            f"expected a folder of our own at {folder} for Ray's files, got: {error}; remove it"
        ) from error
    return folder


def remove_folder(data: Path) -> None:
    """Remove what `new_folder` made, once Ray has ended."""
    shutil.rmtree(_folder(data), ignore_errors=True)


def _folder(data: Path) -> Path:
    digest = hashlib.sha256(str(data.resolve()).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"gradbox-ray-{digest}"
