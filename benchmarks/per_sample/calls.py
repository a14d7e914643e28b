"""Public per-sample calls of this source tree, and of another one beside it.

What is timed is one call on one shard with all that it checks, the plan made by an earlier call.
Processes of the two trees take turns; in each, the summed step and the calls take turns. Each
figure is the median over rounds and processes of CPU time, to the summed step's median in the same
process: a busy machine slows both. One thread, glibc's heap as it is.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import interleaved
from benchmarks.page import section, table
from benchmarks.per_sample.workloads import WORKLOADS, Workload, call, summed_gradient
from benchmarks.source_trees import trees_in_turn

PROCESSES = 3  # of each tree and workload
ROUNDS: Mapping[str, int] = {"W2 B=2": 200, "W2 B=256": 20}
OTHER_ROUNDS = 3
FORMS: Mapping[str, Mapping[str, Any]] = {
    "factors": {"form": "factored"},
    "norms": {"reduce": "norm"},
    "dense": {},
}
MANY = "factors, three shards"


@dataclass(frozen=True)
class CallTimes:
    """Medians of one workload's calls from one tree: of CPU seconds and of ratios to the base."""

    workload: str
    tree: str
    base_s: float
    ratios: Mapping[str, float]

    @property
    def later_shard(self) -> float:
        """Return what the factors of a further shard of a job take."""
        return (self.ratios[MANY] - self.ratios["factors"]) / 2


def measure_calls(names: Sequence[str], *, against: Path | None) -> list[CallTimes]:
    """Measure each workload from this tree and from the one at `against`."""
    found = []
    for name in names:
        runs = trees_in_turn(
            "benchmarks.per_sample.calls", name, against=against, processes=PROCESSES
        )
        found += [_medians(name, tree, medians) for tree, medians in runs.items()]
    return found


def calls_section(found: Sequence[CallTimes]) -> str:
    """Describe the measurement."""
    rows = [
        [
            f"{one.workload} {one.tree}",
            f"{one.base_s * 1e3:.2f}",
            *(f"{one.ratios[name]:.2f}" for name in FORMS),
            f"{one.later_shard:.2f}",
        ]
        for one in found
    ]
    return section(
        "Public per-sample calls",
        "One call on one shard, checks included, to one summed forward and backward of the "
        "same batch: medians of CPU time over interleaved rounds and processes, one thread, "
        "glibc's heap as it is. `later shard`: the factors of a further shard of the same job.",
        table(["", "base ms", *FORMS, "later shard"], rows),
    )


def _medians(name: str, tree: str, runs: Sequence[Mapping[str, float]]) -> CallTimes:
    ratios = {
        method: statistics.median(run[method] / run["base"] for run in runs) for method in runs[0]
    }
    base_s = statistics.median(run["base"] for run in runs)
    return CallTimes(name, tree, base_s, ratios)


def _calls(work: Workload) -> dict[str, Callable[[], Any]]:
    return {
        "base": partial(summed_gradient, work),
        **{name: partial(call, work, **how) for name, how in FORMS.items()},
        MANY: partial(call, work, shards=3, **FORMS["factors"]),
    }


def main(arguments: list[str]) -> None:
    """Measure one workload in this process and print the medians, in CPU seconds."""
    (name,) = arguments
    torch.set_num_threads(1)
    calls = _calls(WORKLOADS[name]())
    for run in calls.values():
        run()  # makes the plan
    runs = interleaved(calls, rounds=ROUNDS.get(name, OTHER_ROUNDS))
    medians = {
        method: statistics.median(run.cpu for run in taken) for method, taken in runs.items()
    }
    print(json.dumps(medians))


if __name__ == "__main__":
    main(sys.argv[1:])
