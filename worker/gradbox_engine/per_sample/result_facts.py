"""What a per-sample result states besides its arrays.

Shapes: B samples over all shards, Y outputs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.per_sample.request import SampleResult
from gradbox_engine.per_sample.shard_run import ShardRun


@dataclass
class ResultFacts:
    """What a result states besides its arrays."""

    unreached: set[str]
    values: list[Tensor] = field(default_factory=list)
    routes: dict[str, set[str]] = field(default_factory=dict)
    loops: dict[str, str] = field(default_factory=dict)
    shards: int = 0
    samples: int = 0
    outputs: int = 1

    def add(self, run: ShardRun, values: Tensor) -> None:
        """Add a shard that is done."""
        for name, taken in run.plan.routes.items():
            self.routes.setdefault(name, set()).update(taken)
        self.loops.update(run.plan.loops)
        self.values.append(values)
        self.shards += 1
        self.samples += run.graph.samples
        self.outputs = run.graph.outputs

    def state(self) -> Checkpoint:
        """Return all of it, for another process."""
        facts = {
            "unreached": sorted(self.unreached),
            "routes": {name: sorted(taken) for name, taken in self.routes.items()},
            "loops": self.loops,
            "shards": self.shards,
            "samples": self.samples,
            "outputs": self.outputs,
        }
        return Checkpoint({"values": torch.cat(self.values)}, facts)

    def resume(self, found: Checkpoint) -> None:
        """Go on from a `state` of another process."""
        facts = found.facts
        self.unreached = set(facts["unreached"])
        self.values = [found.tensors["values"]]
        self.routes = {name: set(taken) for name, taken in facts["routes"].items()}
        self.loops = dict(facts["loops"])
        self.shards, self.samples = facts["shards"], facts["samples"]
        self.outputs = facts["outputs"]

    def result(self, names: Sequence[str], start: float, **found: Any) -> SampleResult:
        """Return the result of a job that began at `start`."""
        return SampleResult(
            **found,
            values=self.values[0] if len(self.values) == 1 else torch.cat(self.values),
            roads={
                name: ("loop",) if name in self.loops else tuple(sorted(taken))
                for name, taken in self.routes.items()
            },
            loops=self.loops,
            unreached=tuple(name for name in names if name in self.unreached),
            names=tuple(names),
            samples=self.samples,
            outputs=self.outputs,
            seconds=time.perf_counter() - start,
        )
