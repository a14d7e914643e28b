"""One benchmark run from this source tree and from another one, in processes that take turns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from benchmarks.measure import QUIET, in_fresh_process

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("client", "service", "worker")


def trees_in_turn(
    module: str, argument: str, *, against: Path | None, processes: int
) -> Mapping[str, list[dict[str, float]]]:
    """Run a module of this tree's benchmarks on each tree's sources; return what each run printed.

    Args:
        module: prints one JSON object of numbers as its last line, given the argument.
        against: the other tree, called "before"; without it there is only "this".
        processes: of each tree.
    """
    trees = {"this": ROOT} if against is None else {"before": against, "this": ROOT}
    runs: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
    for _ in range(processes):
        for tree, folder in trees.items():
            runs[tree].append(_run(module, argument, folder))
    return runs


def _run(module: str, argument: str, tree: Path) -> dict[str, float]:
    paths = [str(tree / source) for source in SOURCES]
    python_path = os.pathsep.join([*paths, str(ROOT)])
    env = {**QUIET, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path, "PYTHONSAFEPATH": "1"}
    found: dict[str, float] = in_fresh_process(module, argument, env=env)
    return found
