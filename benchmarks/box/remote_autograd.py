"""A training step through a remote model, against the same step on a local one.

`f(x)` for every shard, a loss in plain Python, `loss.backward()`: through a box on loopback that
`gradbox up` starts, one worker on the CPU with as many threads as the local code; once with graphs
waiting on the box between the two halves as far as its memory goes (the default), once without.
Local code is written out below, twice: as one would write it first, with the graphs of all shards
alive, which the bar is about; and replaying, with one shard's graph at a time, which is all that
fits where `retain=0` does.

A round is one step of each, in turn. A remote step runs from the first call until the gradients
are in the client's hands, uploads and downloads included. As in a training loop no input comes
twice: each round has the rows of its shards in another order.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.measure import median_of_ratios, relative_difference
from benchmarks.page import section, table, verdict
from gradbox import GradClient
from gradbox_engine import shard_stream
from gradbox_worker.demo import task
from gradbox_worker.demo.box import running_box

SAME: Final = 1e-5  # float32, another order of summation
ALLOWANCE: Final = 1.15
LONG_ENOUGH_S: Final = 5.0

Grads = dict[str, Tensor]
Step = Callable[[task.Shards], Grads]


@dataclass(frozen=True)
class AutogradPlan:
    """What to measure."""

    num_pairs: int
    shard: int
    rounds: int
    threads: int


@dataclass(frozen=True)
class AutogradOverhead:
    """Wall seconds of each way, one for each round.

    `retained` and `replayed` are shards of the remote steps that may keep graphs, in all rounds.
    """

    plan: AutogradPlan
    remote_s: tuple[float, ...]
    remote_replaying_s: tuple[float, ...]
    naive_s: tuple[float, ...]
    replaying_s: tuple[float, ...]
    retained: int
    replayed: int

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios of the remote step to the naive one."""
        return median_of_ratios(self.remote_s, self.naive_s)


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
    times: list[list[float]] = []
    with (
        tempfile.TemporaryDirectory(prefix="gradbox-bench-") as folder,
        running_box(Path(folder)) as (url, token),
        GradClient(url=url, token=token) as client,
    ):
        remote, replaying = (_Remote(client, retain=retain) for retain in ("auto", 0))
        steps: list[Step] = [remote, replaying, partial(_naive, model), partial(_replaying, model)]
        for number in range(plan.rounds + 1):
            given = [_rolled(shard, number) for shard in shards]
            seconds, grads = [], []
            for step in steps:
                began = time.perf_counter()
                grads.append(step(given))
                seconds.append(time.perf_counter() - began)
                if step is remote:
                    remote.count()
            apart = max(relative_difference(grads[0], other) for other in grads[1:])
            if apart > SAME:
                raise RuntimeError(f"the gradients differ by {apart:.1e}")
            times.append(seconds)
    # The first round is every way's first step: caches fill, files and memory come into being.
    remote_s, remote_replaying_s, naive_s, replaying_s = zip(*times[1:], strict=True)
    return AutogradOverhead(
        plan,
        remote_s,
        remote_replaying_s,
        naive_s,
        replaying_s,
        retained=remote.retained,
        replayed=remote.replayed,
    )


def autograd_section(found: AutogradOverhead) -> str:
    """Describe the benchmark."""
    plan, naive_s = found.plan, statistics.median(found.naive_s)
    bar = verdict(
        found.ratio <= ALLOWANCE and naive_s >= LONG_ENOUGH_S,
        f"the remote step takes {found.ratio:.3f} of a local one of {naive_s:.1f} s, allowed "
        f"{ALLOWANCE} at {LONG_ENOUGH_S:.0f} s or more",
    )
    ways = {
        "remote model": found.remote_s,
        "remote model, `retain=0`": found.remote_replaying_s,
        "local, all graphs kept": found.naive_s,
        "local, one shard's graph at a time": found.replaying_s,
    }
    rows = [
        [
            name,
            f"{statistics.median(times_s):.2f}",
            f"{median_of_ratios(times_s, found.naive_s):.3f}",
        ]
        for name, times_s in ways.items()
    ]
    fair = median_of_ratios(found.remote_replaying_s, found.replaying_s)
    return section(
        "Remote autograd",
        f"One step of InfoNCE over {plan.num_pairs} pairs, shard {plan.shard}, "
        f"{plan.threads} thread(s), medians of {plan.rounds} interleaved rounds, over loopback.",
        table(["", "wall s", "to all graphs kept"], rows),
        [
            f"- {bar}",
            f"- {found.retained} shards of its steps had their graphs kept, {found.replayed} were "
            "replayed",
            f"- both replaying, the remote step takes {fair:.3f} of the local one",
        ],
    )


def _loss(zs: list[Tensor]) -> Tensor:
    queries, passages = torch.cat(zs).chunk(2)
    return task.info_nce(queries, passages)


class _Remote:
    """The remote step, and what its manifests say."""

    def __init__(self, client: GradClient, *, retain: Any) -> None:
        self._client = client
        self._retain = retain
        self.retained = self.replayed = 0

    def __call__(self, shards: task.Shards) -> Grads:
        f = self._client.model(
            task.MODEL,
            mode="train",
            seed=task.SEED,
            output=task.OUTPUT,
            readout=task.mean_pooling,
            retain=self._retain,
        )
        _loss([f(shard) for shard in shards]).backward()
        return f.grads

    def count(self) -> None:
        """Note from the last job's manifest how many graphs were kept."""
        (job,) = self._client.jobs(limit=1)
        manifest = job.result().manifest
        self.retained += manifest.shards_retained or 0
        self.replayed += manifest.shards_replayed or 0


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


def _rolled(shard: dict[str, Tensor], by: int) -> dict[str, Tensor]:
    return {name: tensor.roll(by, 0) for name, tensor in shard.items()}
