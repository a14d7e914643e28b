"""What Ray is told by its environment, which it reads when it is imported.

Ray listens on loopback alone where it takes itself to be on a platform without clusters; one
variable has it think so. Every process of a cluster needs its token. Nothing is reported to Ray's
makers.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from typing import Final

# Ray waits a minute for a control service to come back, as that of another machine may; one that
# was started here does not.
RECONNECT_S: Final = 10
RECONNECT: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"


def start_here(token: str) -> None:
    """Have the Ray that this process starts listen on loopback alone, and ask for this token."""
    _before_ray_is_imported()
    _stay_here()
    os.environ[RECONNECT] = str(RECONNECT_S)
    os.environ["RAY_AUTH_TOKEN"] = token
    _guarded()


def reach(address: str) -> None:
    """Have Ray join a cluster, whose token the environment has, or ~/.ray."""
    _before_ray_is_imported()
    if _is_loopback(address):
        _stay_here()
    _guarded()


def _stay_here() -> None:
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def _guarded() -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_loopback
    except ValueError:
        return False


def _before_ray_is_imported() -> None:
    if "ray" in sys.modules:
        raise RuntimeError("expected to be called before Ray is imported, which reads it then")
