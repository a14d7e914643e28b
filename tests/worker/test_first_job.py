"""What a first job would import lazily from torch is there when the device process serves."""

from __future__ import annotations

import subprocess
import sys

FIRST_JOB = """
import sys
import gradbox_worker.device.serving
import torch
from gradbox_worker.device.importing import import_for_jobs
from gradbox_engine.per_sample import jacobian, per_sample_gradient

model, shard = torch.nn.Linear(3, 2), {"0": torch.randn(4, 3)}
import_for_jobs()
before = set(sys.modules)
jacobian(model, [shard])
per_sample_gradient(model, [shard], lambda z: z.square().sum(1))
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""


def test_a_first_job_imports_nothing_of_torch() -> None:
    run = subprocess.run(
        [sys.executable, "-c", FIRST_JOB], check=True, capture_output=True, text=True
    )
    assert not {"torch", "sympy", "mpmath"} & set(run.stdout.split())
