"""A set gradient with nothing and with everything kept, from this source tree and another one.

Processes of the trees take turns; in each, the gradient's step runs between two naive steps, which
hold all graphs, and is compared with their mean: CPU time, medians over rounds, one thread.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import bracketed, reuse_memory
from benchmarks.page import section, table
from benchmarks.set_loss.pairs import TOWERS
from benchmarks.set_loss.workloads import SEED, Workload
from benchmarks.source_trees import trees_in_turn
from gradbox.losses import info_nce
from gradbox_engine import Group, Objective, set_gradient

PROCESSES = 3  # of each tree and task
TASKS: Mapping[str, tuple[int, int]] = {"minilm": (32, 3), "cnn": (64, 4), "lstm": (64, 8)}
"""Samples, which go in shards of SHARD, and rounds."""
SHARD = 8
KEPT: Mapping[str, Any] = {"nothing kept": 0, "everything kept": "auto"}


@dataclass(frozen=True)
class Ends:
    """Medians over processes of one task's ratios to the naive step, from one tree."""

    task: str
    tree: str
    ratios: Mapping[str, float]


def measure_ends(tasks: Sequence[str], *, against: Path | None) -> list[Ends]:
    """Measure each task from this tree and from the one at `against`."""
    found = []
    for task in tasks:
        runs = trees_in_turn("benchmarks.replay.ends", task, against=against, processes=PROCESSES)
        for tree, ratios in runs.items():
            medians = {name: statistics.median(run[name] for run in ratios) for name in KEPT}
            found.append(Ends(task, tree, medians))
    return found


def ends_section(found: Sequence[Ends]) -> str:
    """Describe the measurement."""
    rows = [
        [f"{one.task} {one.tree}", *(f"{one.ratios[name]:.3f}" for name in KEPT)] for one in found
    ]
    return section(
        "Set gradients, nothing and everything kept",
        f"One step in shards of {SHARD} to the naive step that holds all graphs: medians of "
        f"CPU time over interleaved rounds and {PROCESSES} processes of each tree in turn, "
        "one thread.",
        table(["", *KEPT], rows),
    )


def _gradient(workload: Workload, retain: Any) -> Callable[[], object]:
    encoder = workload.encoder()
    groups = [Group(name=tower, shards=workload.shards[tower]) for tower in TOWERS]
    objective = Objective(function=info_nce)
    return lambda: set_gradient(encoder, groups, objective, seed=SEED, mode="train", retain=retain)


def _naive(workload: Workload) -> Callable[[], object]:
    encoder = workload.encoder()

    def step() -> None:
        encoder.zero_grad(set_to_none=True)
        towers = (torch.cat([encoder(**s) for s in workload.shards[tower]]) for tower in TOWERS)
        info_nce(*towers).backward()

    return step


def main(arguments: list[str]) -> None:
    """Measure one task in this process and print the ratios."""
    (task,) = arguments
    torch.set_num_threads(1)
    reuse_memory()
    num_samples, rounds = TASKS[task]
    workload = Workload(num_samples // 2, SHARD, task)
    runs = {name: _gradient(workload, retain) for name, retain in KEPT.items()}
    ratios, _ = bracketed(runs, _naive(workload), rounds=rounds, seconds=0, cpu=True)
    print(json.dumps({name: ratio.median for name, ratio in ratios.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
