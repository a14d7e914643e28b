"""Per-sample jobs as their users run them: from submit until the result is in the client's hands.

The box is what `gradbox up` starts, one worker on one thread of the CPU; the job goes through its
queue, the rows through its file, and the client downloads them. Beside it the same call of the
engine in this process. Wall time, the least of some rounds in turn.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import timed
from benchmarks.page import section, table
from benchmarks.per_sample.workloads import WORKLOADS, Workload, call
from gradbox import GradClient, Jacobian, PerSampleGradient
from gradbox_worker.demo.box import running_box

ROUNDS = 2
FORMS: Mapping[str, Mapping[str, Any]] = {
    "dense": {"form": "dense"},
    "factored": {"form": "factored"},
    "norms": {"reduce": "norm"},
}


@dataclass(frozen=True)
class JobTime:
    """Least wall seconds of one kind of result."""

    workload: str
    form: str
    direct_s: float
    job_s: float


def measure_jobs(names: Sequence[str]) -> list[JobTime]:
    """Measure each workload's jobs, and the same calls here."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    works = {name: WORKLOADS[name]() for name in names}
    with (
        tempfile.TemporaryDirectory(prefix="gradbox-bench-") as folder,
        running_box(Path(folder), registered=_models(works)) as (url, token),
        GradClient(url=url, token=token) as client,
    ):
        return [
            _measured(client, work, form, how)
            for work in works.values()
            for form, how in FORMS.items()
        ]


def jobs_section(times: Sequence[JobTime]) -> str:
    """Describe the measurement."""
    rows = [[t.workload, t.form, f"{t.direct_s * 1e3:.0f}", f"{t.job_s * 1e3:.0f}"] for t in times]
    return section(
        "Per-sample jobs, from submit to result",
        "Wall time in ms, the least of some rounds: the call of the engine in one process, and "
        "the job through a box on loopback (queue, worker, file, download).",
        table(["workload", "result", "call ms", "job ms"], rows),
    )


def _models(works: Mapping[str, Workload]) -> str:
    return "".join(
        f'[models.{_registered(name)}]\nbuilder = "python"\n'
        f'source = "benchmarks.per_sample.workloads:model"\nkwargs = {{name = "{name}"}}\n'
        for name in works
    )


def _registered(name: str) -> str:
    return name.lower().replace(" ", "-").replace("=", "")


def _measured(client: GradClient, work: Workload, form: str, how: Mapping[str, Any]) -> JobTime:
    shared: dict[str, Any] = {
        "model": _registered(work.name),
        "inputs": [work.shard],
        "output": work.output,
    }

    def through() -> Any:
        if work.outputs > 1:
            return client.submit(Jacobian(**shared, **how)).result()
        return client.submit(PerSampleGradient(**shared, loss=work.loss, **how)).result()

    def direct() -> Any:
        return call(work, **how)

    direct_s = job_s = float("inf")
    direct(), through()
    for _ in range(ROUNDS):
        direct_s, job_s = min(direct_s, timed(direct).wall), min(job_s, timed(through).wall)
    return JobTime(work.name, form, direct_s, job_s)
