"""What `python -m proofs.cuda` runs, in this order: what matters most comes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Step:
    """One process of the plan. `limit_s` ends it; what it wrote until then is reported."""

    name: str
    title: str
    command: Sequence[str]  # behind `python -m`; {section} and {junit} are files it writes
    limit_s: float


def _tests(name: str, title: str, *paths: str, limit_s: float, processes: int = 0) -> Step:
    spread = ["-n", str(processes)] if processes else []
    command = ["pytest", "-q", "--junitxml={junit}", "--timeout=120", *spread, *paths]
    return Step(name, title, command, limit_s)


def _benchmark(part: str, title: str, *, limit_s: float) -> Step:
    command = ["benchmarks", "cuda", "--parts", part, "--section", "{section}"]
    return Step(f"benchmark-{part}", title, command, limit_s)


def plan(processes: int) -> list[Step]:
    """Return the steps; tests that need no device to themselves share so many processes."""
    return [
        _tests(
            "streams",
            "Streams, kernels and bits",
            "tests/cuda/test_streams.py",
            "tests/cuda/test_numerics.py",
            limit_s=150,
        ),
        _tests(
            "memory",
            "Memory that runs out, and kept graphs",
            "tests/cuda/test_out_of_memory.py",
            "tests/cuda/test_retention.py",
            limit_s=90,
        ),
        _tests(
            "tables",
            "The tables of problems, in the engine",
            "tests/engine/test_oracle.py",
            "tests/engine/mixed/test_oracle.py",
            "tests/engine/per_sample/test_rules.py",
            "tests/engine/replay/test_numbers.py",
            limit_s=150,
            processes=processes,
        ),
        _benchmark("engine", "The engine over its kernels, and peers at equal memory", limit_s=150),
        _tests(
            "device-process",
            "A worker whose device fails",
            "tests/cuda/test_device_process.py",
            limit_s=150,
        ),
        _tests(
            "client",
            "Jobs from a client through a box",
            "tests/client/test_scenarios.py",
            "tests/client/test_remote_oracle.py",
            limit_s=150,
        ),
        _benchmark("per-sample", "Rows for every sample", limit_s=150),
        _benchmark("upload", "From the host to the device", limit_s=60),
        _benchmark("decoder", "A decoder of 1.3 billion parameters", limit_s=120),
        _benchmark("mixed", "Mixed gradients", limit_s=60),
        _benchmark("service", "What a box adds", limit_s=120),
        _benchmark("graphs", "CUDA graphs and torch.compile", limit_s=170),
        _tests(
            "engine",
            "All tests of the engine",
            "tests/engine",
            limit_s=240,
            processes=processes,
        ),
        _tests(
            "worker",
            "Tests of the worker",
            "tests/worker/test_turn.py",
            "tests/worker/test_inthread.py",
            "tests/worker/test_worker_process.py",
            "tests/worker/test_resume.py",
            limit_s=150,
        ),
    ]


DEFAULT_MINUTES: Final = 25.0
