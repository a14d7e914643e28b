"""Which device a process computes on, what it is called, and how much memory it has."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

import torch

CPUINFO: Final = Path("/proc/cpuinfo")


def choose_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is the first CUDA device, or the CPU.

    Raises:
        ValueError: there is no such device here; the message lists what there is.
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
        raise ValueError(f"expected a device of this machine ({', '.join(offered)}), got {name!r}")
    return torch.device(name)


def memory_bytes(device: torch.device) -> int:
    """Return the size of the device's memory; for a CPU that of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def hardware_name(device: torch.device) -> str:
    """Return what the device calls itself; "" where nothing says."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
