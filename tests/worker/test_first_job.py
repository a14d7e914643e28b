"""What a serving device process has imported: all of torch that a first job needs, no network."""

from __future__ import annotations

import subprocess
import sys

FIRST_JOB = """
import sys
import gradbox_worker.device.serving
import torch
from gradbox_worker.device.importing import import_for_jobs
from gradbox.interpreting.memory_meter import metered
from gradbox_engine.per_sample import jacobian, per_sample_gradient

model, shard = torch.nn.Linear(3, 2), {"0": torch.randn(4, 3)}
import_for_jobs()
before = set(sys.modules)
jacobian(model, [shard])
per_sample_gradient(model, [shard], lambda z: z.square().sum(1))
metered(lambda z: (z * z).sum(), budget_bytes=2**20)(torch.randn(4, 2))
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""


NETWORK = """
import sys
import gradbox_worker.device.main
import gradbox_worker.device.serving
print(*{"httpx", "redis", "rq", "typer", "fastapi"} & set(sys.modules))
"""


def test_a_device_imports_nothing_of_the_network() -> None:
    run = subprocess.run(
        [sys.executable, "-c", NETWORK], check=True, capture_output=True, text=True
    )
    assert run.stdout.split() == []


def test_a_first_job_imports_nothing_of_torch() -> None:
    run = subprocess.run(
        [sys.executable, "-c", FIRST_JOB], check=True, capture_output=True, text=True
    )
    assert not {"torch", "sympy", "mpmath"} & set(run.stdout.split())
