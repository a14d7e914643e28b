"""What a serving device has imported: all of torch that a first job needs, no network, no Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

FIRST_JOB = """
import sys
import gradbox_worker.device.main
import gradbox_worker.device.serving
import torch
from gradbox_worker.device.importing import import_for_jobs

print(*sys.modules)
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


@pytest.fixture(scope="module")
def imported() -> tuple[set[str], set[str]]:
    """Modules of a process that serves, and packages that its first jobs import."""
    command = [sys.executable, "-c", FIRST_JOB]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    serving, first_job = run.stdout.splitlines()
    return set(serving.split()), set(first_job.split())


def test_a_device_imports_nothing_of_the_network_or_of_ray(
    imported: tuple[set[str], set[str]],
) -> None:
    serving, _ = imported
    assert "torch" in serving
    assert not {"httpx", "redis", "rq", "typer", "fastapi", "ray"} & serving


def test_a_first_job_imports_nothing_of_torch(imported: tuple[set[str], set[str]]) -> None:
    _, by_first_job = imported
    assert not {"torch", "sympy", "mpmath"} & by_first_job
