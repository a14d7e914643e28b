"""The plot of the retention benchmark: time against memory, peers as points."""

from __future__ import annotations

from pathlib import Path

from benchmarks.page import MIB
from benchmarks.replay.retention import Retention, Setting
from benchmarks.set_loss.peers import SHARDED

MARKERS = "oPXsDv"


def plot_retention(found: Retention, path: Path) -> None:
    """Draw one panel for each task, at its largest setting with the most budgets.

    Args:
        path: where to save; the suffix decides the format.
    """
    from matplotlib.figure import Figure

    settings = [_best(found, task) for task in found.plan.tasks]
    figure = Figure(figsize=(4.6 * len(settings), 3.8), layout="constrained")
    axes = figure.subplots(1, len(settings), squeeze=False)[0]
    for axis, setting in zip(axes, settings, strict=True):
        _draw(axis, setting)
    figure.savefig(path, dpi=110)


def _best(found: Retention, task: str) -> Setting:
    settings = [s for s in found.settings if s.workload.task == task]
    return max(settings, key=lambda s: (len(s.kept), s.workload.num_pairs, s.workload.shard))


def _draw(axis, setting: Setting) -> None:  # type: ignore[no-untyped-def]
    workload = setting.workload
    curve = [(p.peak_bytes / MIB, p.time) for p in setting.kept.values() if p.peak_bytes]
    axis.plot(*zip(*sorted(curve), strict=True), "k.-", label="gradbox, by budget")
    for marker, (name, point) in zip(MARKERS, setting.peers.items(), strict=False):
        if point.peak_bytes is not None:
            axis.plot(point.peak_bytes / MIB, point.time, marker, label=name)
    axis.axhline(setting.peers[SHARDED.name].time, color="0.8", linewidth=0.8)
    axis.set_title(f"{workload.task}, {2 * workload.num_pairs} samples, shard {workload.shard}")
    axis.set_xlabel("peak memory beyond the model, MiB")
    axis.set_ylabel("time to the naive sharded step")
    axis.legend(fontsize=7)
