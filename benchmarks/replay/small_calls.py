"""Small set gradients of this source tree through a real model, and of another one beside it.

One sentence through all-MiniLM-L6-v2 (120 modules), by `set_gradient` and by the plain forward and
backward pass, which take turns; of the last block's parameters, and of all. What the engine adds is
the same for a large shard, and so matters where shards are small. Processes of the two trees take
turns; medians of wall time, one thread.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.measure import interleaved
from benchmarks.page import section, table
from benchmarks.source_trees import trees_in_turn
from gradbox_engine import Group, Objective, set_gradient
from gradbox_worker.demo import task

DIFFERENTIATED: Final = {"the last block": "encoder.layer.5.*", "all parameters": "*"}
SENTENCE: Final = "a red fox"
PROCESSES: Final = 3
ROUNDS: Final = 40


@dataclass(frozen=True)
class SmallCalls:
    """Medians over the processes of one tree: milliseconds of a plain step and of a call."""

    differentiated: str
    tree: str
    plain_ms: float
    call_ms: float
    ratio: float


def measure_small_calls(*, against: Path | None) -> list[SmallCalls]:
    """Measure from this tree and from the one at `against`."""
    found = []
    for name in DIFFERENTIATED:
        runs = trees_in_turn(
            "benchmarks.replay.small_calls", name, against=against, processes=PROCESSES
        )
        for tree, medians in runs.items():
            plain = statistics.median(run["plain"] for run in medians)
            call = statistics.median(run["call"] for run in medians)
            ratio = statistics.median(run["call"] / run["plain"] for run in medians)
            found.append(SmallCalls(name, tree, plain * 1e3, call * 1e3, ratio))
    return found


def small_calls_section(found: Sequence[SmallCalls]) -> str:
    """Describe the measurement."""
    rows = [
        [
            one.differentiated,
            one.tree,
            f"{one.plain_ms:.1f}",
            f"{one.call_ms:.1f}",
            f"{one.ratio:.2f}",
        ]
        for one in found
    ]
    return section(
        "Small set gradients",
        "One sentence through all-MiniLM-L6-v2, a plain step and `set_gradient` in turn; "
        "medians of wall time over rounds and processes, one thread.",
        table(["of", "tree", "plain step, ms", "set_gradient, ms", "ratio"], rows),
    )


def main(arguments: list[str]) -> None:
    """Measure one selection of parameters in this process and print the medians, in seconds."""
    (name,) = arguments
    torch.set_num_threads(1)
    calls = _calls(DIFFERENTIATED[name])
    for call in calls.values():
        call()  # pages in the code
    runs = interleaved(calls, rounds=ROUNDS)
    print(
        json.dumps({way: statistics.median(r.wall for r in taken) for way, taken in runs.items()})
    )


def _calls(wrt: str) -> dict[str, Callable[[], Any]]:
    from transformers import AutoModel, AutoTokenizer

    model: Any = AutoModel.from_pretrained(task.model_folder()).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(task.model_folder())
    shard = dict(tokenizer([SENTENCE], return_tensors="pt"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(fnmatchcase(name, wrt))

    def plain() -> None:
        model.zero_grad()
        _loss(model(**shard).last_hidden_state).backward()

    def call() -> None:
        groups = [Group("z", [shard])]
        set_gradient(model, groups, Objective(_loss), wrt=[wrt], output=task.OUTPUT)

    return {"plain": plain, "call": call}


def _loss(z: Tensor) -> Tensor:
    return z.square().sum()


if __name__ == "__main__":
    main(sys.argv[1:])
