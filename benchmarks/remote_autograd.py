"""A training step through a remote model, against the same step on a local one.

`f(x)` for every shard, a loss in plain Python, `loss.backward()`: through a box on loopback that
`gradbox up` starts, one worker on the CPU with as many threads as the local code. Local code is
written out below: forward passes without graphs, the loss, and one shard's graph at a time for the
way back. That is what fits where the remote step does. For comparison, and under no bar: local code
that keeps the graphs of all shards, which computes each forward pass once and not twice.

A round is one step of each, in turn. The remote step runs from the first call until the gradients
are in the client's hands, uploads and downloads included.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.page import table, verdict
from benchmarks.workloads import relative_difference
from gradbox import GradClient
from gradbox_engine import shard_stream
from gradbox_worker.demo import task
from gradbox_worker.demo.box import running_box

SAME: Final = 1e-5  # float32, another order of summation
ALLOWANCE: Final = 1.15
LONG_ENOUGH_S: Final = 5.0

Grads = dict[str, Tensor]


@dataclass(frozen=True)
class AutogradPlan:
    """What to measure."""

    num_pairs: int
    shard: int
    rounds: int
    threads: int


@dataclass(frozen=True)
class AutogradOverhead:
    """Medians in seconds, and the medians of the rounds' ratios to the replaying local step."""

    plan: AutogradPlan
    remote_s: float
    local_s: float
    naive_s: float
    ratio: float
    naive_ratio: float


def measure_remote_autograd(plan: AutogradPlan) -> AutogradOverhead:
    """Run the benchmark.

    Raises:
        RuntimeError: two of the ways give different gradients.
    """
    torch.set_num_threads(plan.threads)
    os.environ["OMP_NUM_THREADS"] = str(plan.threads)
    size = task.Size(num_pairs=plan.num_pairs, shard_size=plan.shard)
    towers = task.tokenised(size)
    shards = [*towers["queries"], *towers["passages"]]
    model = _model()
    with (
        tempfile.TemporaryDirectory(prefix="gradbox-bench-") as folder,
        running_box(Path(folder)) as (url, token),
        GradClient(url=url, token=token) as client,
    ):
        steps: list[Callable[[], Grads]] = [
            lambda: _remote(client, shards),
            lambda: _replaying(model, shards),
            lambda: _naive(model, shards),
        ]
        first, *others = [step() for step in steps]
        apart = max(relative_difference(first, other) for other in others)
        if apart > SAME:
            raise RuntimeError(f"the gradients differ by {apart:.1e}")
        rounds = [[_wall(step) for step in steps] for _ in range(plan.rounds)]
    remote, local, naive = (statistics.median(times) for times in zip(*rounds, strict=True))
    return AutogradOverhead(
        plan,
        remote_s=remote,
        local_s=local,
        naive_s=naive,
        ratio=statistics.median(times[0] / times[1] for times in rounds),
        naive_ratio=statistics.median(times[0] / times[2] for times in rounds),
    )


def autograd_section(found: AutogradOverhead) -> str:
    """Describe the benchmark."""
    plan = found.plan
    bar = verdict(
        found.ratio <= ALLOWANCE and found.local_s >= LONG_ENOUGH_S,
        f"the remote step takes {found.ratio:.3f} of a local one of {found.local_s:.1f} s, allowed "
        f"{ALLOWANCE} at {LONG_ENOUGH_S:.0f} s or more",
    )
    rows = [
        ["remote model", f"{found.remote_s:.2f}"],
        ["local, one shard's graph at a time", f"{found.local_s:.2f}"],
        ["local, all graphs kept", f"{found.naive_s:.2f}"],
    ]
    return "\n".join(
        [
            "## Remote autograd",
            "",
            f"One step of InfoNCE over {plan.num_pairs} pairs, shard {plan.shard}, "
            f"{plan.threads} thread(s), medians of {plan.rounds} interleaved rounds, over "
            "loopback.",
            "",
            *table(["", "wall s"], rows),
            "",
            f"- {bar}",
            f"- against local code that keeps all graphs: {found.naive_ratio:.3f}; a replay "
            "computes each forward pass twice",
        ]
    )


def _loss(zs: list[Tensor]) -> Tensor:
    queries, passages = torch.cat(zs).chunk(2)
    return task.info_nce(queries, passages)


def _remote(client: GradClient, shards: task.Shards) -> Grads:
    f = client.model(
        task.MODEL,
        mode="train",
        seed=task.SEED,
        output=task.OUTPUT,
        readout=task.mean_pooling,
    )
    _loss([f(shard) for shard in shards]).backward()
    return f.grads


def _replaying(model: nn.Module, shards: task.Shards) -> Grads:
    model.zero_grad()
    with torch.no_grad():
        zs = [_embed(model, shard, index) for index, shard in enumerate(shards)]
    leaves = [z.requires_grad_() for z in zs]
    _loss(leaves).backward()
    for index, shard in enumerate(shards):
        _embed(model, shard, index).backward(leaves[index].grad)
    return _grads(model)


def _naive(model: nn.Module, shards: task.Shards) -> Grads:
    model.zero_grad()
    _loss([_embed(model, shard, index) for index, shard in enumerate(shards)]).backward()
    return _grads(model)


def _embed(model: nn.Module, shard: dict[str, Tensor], index: int) -> Tensor:
    with shard_stream(task.SEED, group=0, shard=index):
        return task.mean_pooling(model(**shard).last_hidden_state, shard)


def _grads(model: nn.Module) -> Grads:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _model() -> nn.Module:
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(task.model_folder(), use_safetensors=True)
    trained: nn.Module = model.train()
    return trained


def _wall(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
