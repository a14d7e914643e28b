"""What the service adds: the same job through a box on loopback, against the engine called here.

The box is what `gradbox up` starts, one worker on the CPU with as many threads as the direct call.
A round is one direct call and one job, in turn; the job's time runs from submit until the gradients
are in the client's hands, uploads and download included. Both keep no graphs; by default the job
would keep what fits, and be the faster one.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measure import relative_difference, timed
from benchmarks.page import section, table, verdicts
from gradbox import GradClient
from gradbox_engine import Group, Objective, set_gradient
from gradbox_worker.demo import task
from gradbox_worker.demo.box import running_box

SAME = 1e-5  # float32, other threads' order of summation
ALLOWANCE = 1.10


@dataclass(frozen=True)
class ServicePlan:
    """What to measure."""

    num_pairs: int
    shard: int
    rounds: int
    threads: int


@dataclass(frozen=True)
class ServiceOverhead:
    """Medians in seconds, and the median of the rounds' ratios."""

    num_pairs: int
    shard: int
    rounds: int
    threads: int
    direct_s: float
    service_s: float
    ratio: float


def measure_service(plan: ServicePlan) -> ServiceOverhead:
    """Run the benchmark.

    Raises:
        RuntimeError: the two ways give different gradients.
    """
    torch.set_num_threads(plan.threads)
    os.environ["OMP_NUM_THREADS"] = str(plan.threads)
    towers = task.tokenised(task.Size(num_pairs=plan.num_pairs, shard_size=plan.shard))
    direct = _direct(towers)
    with (
        tempfile.TemporaryDirectory(prefix="gradbox-bench-") as folder,
        running_box(Path(folder)) as (url, token),
        GradClient(url=url, token=token) as client,
    ):
        through = _through(client, towers)
        apart = relative_difference(through(), direct())
        if apart > SAME:
            raise RuntimeError(f"the job's gradients differ from the direct call's by {apart:.1e}")
        pairs = [(timed(direct).wall, timed(through).wall) for _ in range(plan.rounds)]
    return ServiceOverhead(
        plan.num_pairs,
        plan.shard,
        plan.rounds,
        plan.threads,
        direct_s=statistics.median(first for first, _ in pairs),
        service_s=statistics.median(second for _, second in pairs),
        ratio=statistics.median(second / first for first, second in pairs),
    )


def service_section(found: ServiceOverhead) -> str:
    """Describe the service benchmark."""
    sentence = f"the service costs {found.ratio:.3f} of the direct call, allowed {ALLOWANCE}"
    rows = [
        ["direct engine call", f"{found.direct_s:.2f}"],
        ["the same job through the service", f"{found.service_s:.2f}"],
    ]
    return section(
        "Service",
        f"{found.num_pairs} pairs, shard {found.shard}, {found.threads} thread(s), medians of "
        f"{found.rounds} interleaved rounds; submit to result in the client's hands, over "
        "loopback.",
        table(["", "wall s"], rows),
        verdicts([(found.ratio <= ALLOWANCE, sentence)]),
    )


def _direct(towers: dict[str, task.Shards]) -> Callable[[], dict[str, Tensor]]:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(task.model_folder(), use_safetensors=True)
    groups = [Group(name=name, shards=shards) for name, shards in towers.items()]
    objective = Objective(function=task.info_nce)

    def run() -> dict[str, Tensor]:
        return set_gradient(
            model,
            groups,
            objective,
            seed=task.SEED,
            mode="train",
            retain=0,
            output=task.OUTPUT,
            readout=task.mean_pooling,
        ).grads

    return run


def _through(client: GradClient, towers: dict[str, task.Shards]) -> Callable[[], dict[str, Tensor]]:
    def run() -> dict[str, Tensor]:
        job = client.submit(task.job(towers))
        return dict(job.result().grads)

    return run
