"""What a serving device has imported: all of torch that a first job needs, no HTTP, no Ray."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

FIRST_JOB = """
import gc
import sys
import gradbox_worker.device.warm_device
import gradbox_worker.turns.main
import gradbox_worker.turns.serving
import torch
from gradbox_worker.device.importing import import_for_jobs

print(*sys.modules)
from gradbox_engine.per_sample import jacobian, per_sample_gradient

model, shard = torch.nn.Linear(3, 2), {"0": torch.randn(4, 3)}
import_for_jobs()
before = set(sys.modules)
jacobian(model, [shard])
per_sample_gradient(model, [shard], lambda z: z.square().sum(1))
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
print(len(gc.get_objects()), gc.get_freeze_count())
"""


@dataclass(frozen=True)
class Serving:
    """A process that has run its first jobs."""

    modules: set[str]  # before them
    imported: set[str]  # packages, by them
    num_objects: int  # that a full garbage collection looks at
    num_left_out: int


@pytest.fixture(scope="module")
def serving() -> Serving:
    command = [sys.executable, "-c", FIRST_JOB]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    modules, imported, objects = (line.split() for line in run.stdout.splitlines())
    return Serving(set(modules), set(imported), *map(int, objects))


def test_a_device_imports_nothing_of_http_or_of_ray(serving: Serving) -> None:
    assert "torch" in serving.modules
    assert not {"httpx", "fastapi", "ray"} & serving.modules


def test_a_first_job_imports_nothing_of_torch(serving: Serving) -> None:
    assert not {"torch", "sympy", "mpmath"} & serving.imported


def test_a_full_garbage_collection_looks_at_little_of_what_was_imported(serving: Serving) -> None:
    assert serving.num_objects < 0.1 * serving.num_left_out
