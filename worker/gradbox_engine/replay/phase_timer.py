"""How long each phase of a job took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gradbox_engine.requests import Phase


class PhaseTimer:
    """Seconds by phase; on CUDA a phase ends when its kernels do."""

    def __init__(self, *devices: torch.device) -> None:
        self.seconds: dict[Phase, float] = {}
        self._devices = devices

    @contextmanager
    def timed(self, phase: Phase) -> Iterator[None]:
        """Time what runs until this ends."""
        start = time.perf_counter()
        yield
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.seconds[phase] = time.perf_counter() - start
