"""The peak that a receipt states is of its own job."""

from __future__ import annotations

import subprocess
import sys

MIB = 2**20
# In a process of its own: a heap that has grown before takes memory that is resident already.
MEASURED = f"""
import torch
from gradbox_worker.computations.memory import PeakMemory
torch.ones(96 * {MIB} // 4).sum()
peak = PeakMemory(torch.device("cpu"))
torch.ones(48 * {MIB} // 4).sum()
print(*peak.measure())
"""


def test_the_peak_counts_what_was_freed_and_only_since_the_beginning() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True, timeout=500
    )
    peak_bytes, before_bytes = map(int, done.stdout.split())
    assert 44 * MIB < peak_bytes - before_bytes < 72 * MIB
