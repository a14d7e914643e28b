"""The hard limit of what a job may allocate, kept by the operating system or the allocator.

What a graph of a user's takes cannot be seen before it runs: `kthvalue` copies an expanded input,
the gradient of `expand(n)[0]` has n entries. So everything that a job does, model, loss and
backward, runs under a limit under which an allocation fails, as an error like any other: the job
ends as OutOfMemory, and the process stays.

On a host (Linux) it is RLIMIT_DATA, which counts the process's private writable memory (heap,
anonymous mappings, files mapped privately) whether it was touched or not; read-only and shared
mappings are free. What the process has when the job begins is added to it. On CUDA the allocator
itself ends at the device's memory; a smaller limit becomes its fraction. Elsewhere there is none.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from gradbox_engine.host_memory import available_bytes, private_bytes
from gradbox_worker.computations.memory import used_bytes
from gradbox_worker.computations.placement import memory_bytes

# What a job leaves free for the rest of the machine, if it is not told how much it may take.
RESERVE_BYTES: Final = 2**30
RESERVE_SHARE: Final = 0.05


class MemoryLimit:
    """How much memory a job may take beyond what the process has when it begins."""

    def __init__(self, *devices: torch.device, job_bytes: int | None = None) -> None:
        """Limit nothing yet.

        Args:
            devices: the host, another device, or GPUs, on each of which it may take an equal part.
            job_bytes: None is what the host has available when a job begins, less a reserve of
                1 GiB or 5 % of its memory, whichever is more; on CUDA, what the device has.
        """
        self._devices = devices
        self._device = devices[0]
        self._job_bytes = job_bytes

    def leaves_room_of_models(self) -> bool:
        """Return whether a job could take more if models left the device.

        Not where `job_bytes` is its limit, for these are counted from what the process has.
        """
        if self._job_bytes is None:
            return True
        if self._device.type == "cuda":
            return used_bytes(*self._devices) + self._job_bytes > memory_bytes(*self._devices)
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        return most != resource.RLIM_INFINITY and private_bytes() + self._job_bytes > most

    def most_bytes(self) -> int:
        """Return what may be in the device's memory, as `PeakMemory` counts, while a job runs."""
        used, all_bytes = used_bytes(*self._devices), memory_bytes(*self._devices)
        if self._device.type == "cpu":
            return min(all_bytes, used + self._host_bytes())
        return all_bytes if self._job_bytes is None else min(all_bytes, used + self._job_bytes)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the process to the limit until the context ends."""
        if self._device.type == "cuda":
            with self._held_on_cuda():
                yield
        elif self._device.type == "cpu" and sys.platform == "linux":
            with self._held_on_host():
                yield
        else:
            yield

    @contextmanager
    def _held_on_host(self) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_DATA)
        limit = private_bytes() + self._host_bytes()
        highest = limit if before[1] == resource.RLIM_INFINITY else min(limit, before[1])
        resource.setrlimit(resource.RLIMIT_DATA, (highest, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)

    def _host_bytes(self) -> int:
        if self._job_bytes is not None:
            return self._job_bytes
        reserve = max(RESERVE_BYTES, int(memory_bytes(self._device) * RESERVE_SHARE))
        return max(0, available_bytes() - reserve)

    @contextmanager
    def _held_on_cuda(self) -> Iterator[None]:
        if self._job_bytes is None:
            yield
            return
        part_bytes = self._job_bytes // len(self._devices)
        torch.cuda.empty_cache()  # what the allocator has cached counts towards its fraction
        for device in self._devices:
            most_bytes = torch.cuda.memory_allocated(device) + part_bytes
            share = min(1.0, most_bytes / memory_bytes(device))
            torch.cuda.set_per_process_memory_fraction(share, device)
        try:
            yield
        finally:
            for device in self._devices:
                torch.cuda.set_per_process_memory_fraction(1.0, device)
