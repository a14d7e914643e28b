"""The peak that a receipt states is of its own job."""

from __future__ import annotations

import torch

from gradbox_worker.memory import PeakMemory

MIB = 2**20


def test_the_peak_counts_what_was_freed_and_only_since_the_beginning() -> None:
    torch.ones(96 * MIB // 4).sum()
    peak = PeakMemory(torch.device("cpu"))
    torch.ones(48 * MIB // 4).sum()
    peak_bytes, before_bytes = peak.measure()
    assert 44 * MIB < peak_bytes - before_bytes < 72 * MIB
