"""Which devices a box has, without importing torch: those of this machine, or of a cluster."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gradbox_service.settings import BadSettings

# Present where NVIDIA's driver is; without it torch need not be asked.
_DRIVER: Final = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
_ASK: Final = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
ASK_TIMEOUT_S: Final = 120.0
# The part of `up` that leads a cluster.
CLUSTER: Final = "cluster"


def spread(device: str, *, num_workers: int | None) -> list[str]:
    """Return the device of each worker: one worker a device, or `num_workers` in turns.

    Args:
        device: auto, or devices separated by commas.

    Raises:
        BadSettings: no device was named.
    """
    devices = [part.strip() for part in device.split(",") if part.strip()]
    if not devices:
        raise BadSettings(f"expected --device auto, cpu or cuda:0,cuda:1, got {device!r}")
    if devices == ["auto"]:
        devices = [f"cuda:{index}" for index in range(_num_cuda_devices())] or ["auto"]
    count = num_workers or len(devices)
    return [devices[index % len(devices)] for index in range(count)]


def _num_cuda_devices() -> int:
    if not any(path.exists() for path in _DRIVER):
        return 0
    asked = subprocess.run(
        [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=ASK_TIMEOUT_S
    )
    return int(asked.stdout) if asked.returncode == 0 else 0


@dataclass(frozen=True)
class Cluster:
    """What the owner asked for.

    Attributes:
        address: "local", or that of a cluster, HOST:PORT.
        device: the devices of each of its machines, as in `--device`.
    """

    address: str
    device: str
