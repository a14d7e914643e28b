"""Ray started on this machine, or joined.

Ray reads its environment when it is imported, so nothing that imports it may be imported before one
of these was called. It listens on loopback alone where it takes itself to be on a platform without
clusters; one variable has it think so. Every process of a cluster needs its token. Nothing is
reported to Ray's makers.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gradbox_worker.errors import DeviceNotStarted

REACH_S: Final = 5.0
# Ray waits a minute for a control service to come back, as that of another machine may; one that
# was started here does not.
RECONNECT_S: Final = 10


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
    """Start Ray on this machine, with a token of its own; it ends with this process.

    Args:
        folder: for its files.
    """
    _set_environment(
        on_loopback=True,
        RAY_gcs_rpc_server_reconnect_timeout_s=str(RECONNECT_S),
        RAY_AUTH_TOKEN=secrets.token_hex(32),
    )
    return _initialised(
        address="local", num_cpus=num_cpus, include_dashboard=False, _temp_dir=str(folder)
    )


def join(address: str) -> RayOnThisMachine:
    """Join a cluster of which this machine is a node, by the token in the environment or ~/.ray.

    Raises:
        DeviceNotStarted: it is no address, nothing answers there, this machine is no node of that
            cluster, or the token is another.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or "/" in host or not port.isdecimal():
        raise DeviceNotStarted(
            f"expected `local`, or the address of Ray's head as HOST:PORT, got {address!r}; "
            f"`ray start --head` prints it"
        )
    try:  # Ray itself would ask for minutes
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        raise DeviceNotStarted(
            f"expected Ray's head at {address}, where nothing answers: {error}; run `ray start` "
            f"on each machine first (docs/cluster.md)"
        ) from None
    _set_environment(on_loopback=_is_loopback(host))
    from ray.exceptions import RayError

    try:
        return _initialised(address=address)
    except (ConnectionError, RuntimeError, RayError) as error:
        raise DeviceNotStarted(
            f"expected a Ray cluster at {address} that this machine is a node of, got: {error}; "
            f"run `ray start` here first, with the token of the cluster (docs/cluster.md)"
        ) from error


def leave() -> None:
    """End what was started here, or leave what was joined; the actors of this process end."""
    import ray

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
        if os.path.lexists(folder):
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
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


def _set_environment(*, on_loopback: bool, **given: str) -> None:
    if "ray" in sys.modules:
        raise RuntimeError("expected to be called before Ray is imported, which reads it then")
    if on_loopback:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.update(given)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _initialised(**given: Any) -> RayOnThisMachine:
    """Initialise Ray, whose handlers of signals are not wanted."""
    import ray

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
