"""Per-sample gradients and Jacobians against one summed forward and backward of the same batch.

    python -m benchmarks.per_sample [WORKLOAD ...] [--json]

Ratios of minimum CPU time over interleaved rounds, one thread, in one process.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.per_sample_workloads import WORKLOADS, Workload
from gradbox_engine.per_sample import Arena, Session
from gradbox_engine.per_sample.collecting import Keep, Norms, ToArena

REPEATS = 3  # calls in a row, so that one method does not pay for another's cache misses

BARS = {
    "W1": {"dense": 2.6, "norms": 0.85, "gram": 1.0, "factors": 0.75},
    "W2 B=2": {"dense": 2.0},
    "W2 B=256": {"dense": 18.0, "gram": 18.0, "norms": 1.6, "vjp": 1.6},
    "W3": {"dense": 1.45},
    "W4": {"dense": 1.12, "norms": 0.80, "factors": 0.72},
    "W5": {"dense": 8.5},
}


def methods(work: Workload, session: Session) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by name; "base" first."""
    arguments = session.arguments(work.shard)
    parameters = list(session.parameters.values())
    arena = Arena()

    def head(z: Tensor) -> Tensor:
        return z.flatten(1) if work.outputs > 1 else work.loss(z)[:, None]

    def base() -> None:
        torch.autograd.grad(work.loss(session.call(arguments)).sum(), parameters, allow_unused=True)

    def terms() -> Any:
        foldable = work.outputs > 1
        return session.trace(arguments, 0, head, foldable=foldable).terms()

    def collected(collector: Any) -> Any:
        found = terms()
        samples = next(iter(found.values())).samples
        collector.begin(samples, work.outputs)
        collector.take(found, 0, range(work.outputs))
        return collector

    def gram() -> None:
        collected(keep := Keep())
        keep.factors.gram()

    def vjp() -> None:
        traced = session.trace(arguments, 0, head)
        traced.pulled_back(torch.ones_like(traced.value))

    found: dict[str, Callable[[], Any]] = {
        "base": base,
        "dense": lambda: collected(ToArena(arena)),
        "norms": lambda: collected(Norms()),
        "factors": lambda: collected(Keep()),
    }
    if work.name[:2] in ("W1", "W2"):
        found["gram"] = gram
        found["vjp"] = vjp
    return found


def measure(work: Workload) -> dict[str, float]:
    """Return the least CPU seconds of each method, rounds interleaved."""
    least: dict[str, float] = {}
    with Session(work.model, output=work.output, wrt=work.wrt) as session:
        calls = methods(work, session)
        for name, call in calls.items():
            call()
            least[name] = float("inf")
        for _ in range(work.rounds):
            for name, call in calls.items():
                for _ in range(REPEATS):
                    start = time.process_time_ns()
                    call()
                    least[name] = min(least[name], (time.process_time_ns() - start) / 1e9)
    return least


def report(work: Workload, least: dict[str, float]) -> dict[str, Any]:
    """Return the ratios beside their bars."""
    base = least["base"]
    bars = BARS.get(work.name, {})
    return {
        "workload": work.name,
        "base_ms": base * 1e3,
        **{name: round(value / base, 3) for name, value in least.items() if name != "base"},
        "bars": bars,
    }


def main() -> None:
    """Run the named workloads, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if not chosen.json:
        print(
            f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread"
        )
    for name in chosen.workloads:
        work = WORKLOADS[name]()
        line = report(work, measure(work))
        if chosen.json:
            print(json.dumps(line))
            continue
        found = [
            f"{k} {v} (bar {line['bars'].get(k, '–')})"
            for k, v in line.items()
            if k not in ("workload", "base_ms", "bars")
        ]
        print(f"{name}: base {line['base_ms']:.2f} ms; " + "; ".join(found), flush=True)


if __name__ == "__main__":
    main()
