"""How much memory a job needed at its peak, and what was taken before it began.

On CUDA both figures are the allocator's: bytes of tensors, weights of loaded models included. On a
CPU they are the process's resident set, interpreter included; the kernel's high-water mark is reset
when the measurement begins (Linux, proc(5), clear_refs). Where that is not possible the peak is the
process's since its start, which is too high when an earlier job needed more.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import torch

from gradbox.protocol import DeviceMemory
from gradbox_engine.host_memory import resident_bytes, status_bytes
from gradbox_worker.computations.placement import memory_bytes

CLEAR_REFS: Final = "/proc/self/clear_refs"
RESET_HIGH_WATER_MARK: Final = b"5"
RESULT_SHARE: Final = 8
MOST_RESULT_BYTES: Final = 4 * 2**30


def default_result_memory_bytes(device: torch.device) -> int:
    """Return how much of a result may be in memory on its way into its file."""
    return min(MOST_RESULT_BYTES, memory_bytes(device) // RESULT_SHARE)


class PeakMemory:
    """A measurement that begins when it is made."""

    def __init__(self, *devices: torch.device) -> None:
        """Begin.

        Args:
            devices: the CPU, or GPUs; of several the sum of their peaks counts.
        """
        self._gpus = [device for device in devices if device.type == "cuda"]
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)
            torch.cuda.reset_peak_memory_stats(gpu)
        if not self._gpus:
            _reset_high_water_mark()
        self._before_bytes = used_bytes(*devices)

    def measure(self) -> tuple[int, int]:
        """Return (bytes at the peak so far, bytes at the beginning)."""
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)
        if self._gpus:
            return sum(map(torch.cuda.max_memory_allocated, self._gpus)), self._before_bytes
        return status_bytes("VmHWM") or _highest_resident_bytes(), self._before_bytes


def give_back_free_memory() -> None:
    """Return to the system what C's allocator has kept of freed memory, where that is glibc's.

    Without it a process's resident set has the peak of earlier jobs, which new ones use again.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def used_bytes(*devices: torch.device) -> int:
    """Return how many bytes are in the devices' memory now."""
    gpus = [device for device in devices if device.type == "cuda"]
    if gpus:
        return sum(map(torch.cuda.memory_allocated, gpus))
    return resident_bytes() or _highest_resident_bytes()


def measure_device(
    *devices: torch.device, models: Mapping[str, int], before_bytes: int | None = None
) -> DeviceMemory:
    """Return what is in the memory of a device now, which may be several GPUs.

    Args:
        models: bytes of weights on the device, by model.
        before_bytes: what was used when the running job began; None if none runs.
    """
    used = used_bytes(*devices)
    return DeviceMemory(
        total_bytes=memory_bytes(*devices),
        used_bytes=used,
        models=dict(models),
        job_bytes=0 if before_bytes is None else max(0, used - before_bytes),
    )


def _reset_high_water_mark() -> None:
    try:
        descriptor = os.open(CLEAR_REFS, os.O_WRONLY)
    except OSError:  # not Linux, or a container that forbids it
        return
    with suppress(OSError):
        os.write(descriptor, RESET_HIGH_WATER_MARK)
    os.close(descriptor)


def _highest_resident_bytes() -> int:
    """Return it since the process's start, where there is no /proc."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
