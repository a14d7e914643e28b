"""The mixed gradient against double backward, over the number of shards."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.cuda.clock import Clock
from benchmarks.cuda.sizes import Sizes
from benchmarks.mixed.task import METHODS, Task
from benchmarks.page import mebibytes, section, table

NUM_SHARDS = (1, 8, 32)
SHARD = 16


def measure(clock: Clock, sizes: Sizes) -> str:
    """Return the section."""
    rows = []
    small = sizes.mixed_depth == 1
    for num in NUM_SHARDS[:2] if small else NUM_SHARDS:
        task = _on(
            Task(num_shards=num, shard=2 if small else SHARD, depth=sizes.mixed_depth), clock
        )
        runs = {name: partial(run, task) for name, run in METHODS.items()}
        times = clock.interleaved(runs, rounds=sizes.rounds)
        peaks = {name: clock.peak_bytes(run) for name, run in runs.items()}
        expected = task.double_backward()
        error = float((task.gradbox() - expected).norm() / expected.norm())
        ours, theirs = METHODS
        rows.append(
            [
                str(num),
                f"{times[ours].median * 1e3:.1f}",
                f"{times[theirs].median * 1e3:.1f}",
                str(times[ours].ratio(times[theirs])),
                *("n/a" if p is None else mebibytes(p) for p in peaks.values()),
                f"{error:.1e}",
            ]
        )
    head = ["shards", "gradbox ms", "double backward ms", "ratio", "gradbox MiB"]
    head += ["double backward MiB", "relative error (fp32)"]
    return section("Mixed gradients", table(head, rows))


def _on(task: Task, clock: Clock) -> Task:
    task.generator.to(clock.device)
    task.shards = [shard.to(clock.device) for shard in task.shards]
    y: Tensor = task.y.detach().to(clock.device)
    task.y = y.requires_grad_()
    torch.manual_seed(0)
    return task
