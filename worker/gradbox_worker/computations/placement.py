"""Which device a process computes on, what it is called, and how much memory it has."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

import torch

from gradbox_worker.errors import DeviceNotStarted

CPUINFO: Final = Path("/proc/cpuinfo")


def choose_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is the first CUDA device, or the CPU.

    Raises:
        DeviceNotStarted: there is no such device here; the message lists what there is.
    """
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda:0" if num_cuda else "cpu")
    offered = ["cpu", *(f"cuda:{index}" for index in range(num_cuda))]
    if torch.backends.mps.is_available():
        offered.append("mps")
    if name == "cuda" and num_cuda:
        return torch.device("cuda:0")
    if name not in offered:
        raise DeviceNotStarted(
            f"expected a device of this machine ({', '.join(offered)}), got {name!r}; name one of "
            f"them with --device; of a GPU, `gradbox doctor --device cuda:0` says what is missing"
        )
    return torch.device(name)


def gpus_of(device: torch.device, *, num_gpus: int) -> tuple[torch.device, ...]:
    """Return so many GPUs from a device on, itself first; none where it is not one.

    Raises:
        DeviceNotStarted: there are not so many here.
    """
    if device.type != "cuda":
        return ()
    first = device.index or 0
    found = torch.cuda.device_count()
    if first + num_gpus > found:
        raise DeviceNotStarted(
            f"expected {num_gpus} GPUs from {device} on, got {found} in this process"
        )
    return tuple(torch.device("cuda", first + index) for index in range(num_gpus))


def memory_bytes(*devices: torch.device) -> int:
    """Return the size of the devices' memory; for a CPU that of the machine."""
    return sum(map(_memory_bytes, devices))


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def hardware_name(*devices: torch.device) -> str:
    """Return what a device calls itself; "" where nothing says. It may be several GPUs."""
    if devices[0].type == "cuda":
        name = str(torch.cuda.get_device_name(devices[0]))
        return name if len(devices) == 1 else f"{len(devices)} × {name}"
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
