"""The README's picture: peak memory, and time a pair, against the batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.page import MIB
from benchmarks.replay.batch_sizes import KEPT, Batches

GREY: Final = "#8a8f98"  # readable on a light and on a dark page
COLOURS: Final = {
    "plain code": "#c44e52",
    "GradCache": "#8172b3",
    "gradbox": "#2a7f9e",
    f"gradbox, room for {KEPT} graphs": "#55a868",
}


def plot_batches(found: Batches, path: Path) -> None:
    """Draw both panels, side by side.

    Args:
        path: where to save; the suffix decides the format.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gradbox", "font.size": 11}):
        figure = Figure(figsize=(10, 3.8), layout="constrained")
        figure.patch.set_alpha(0.0)
        memory, time = figure.subplots(1, 2)
        for name, peaks in found.peaks.items():
            gib = {num: peak / MIB / 1024 for num, peak in peaks.items()}
            _curve(memory, gib, name)
            _curve(time, found.ms_per_pair(name), name)
        memory.set_yscale("log")
        memory.set_yticks([0.25, 0.5, 1, 2, 4, 8], ["¼", "½", "1", "2", "4", "8"])
        memory.minorticks_off()
        memory.set_title("peak memory beyond the model, GiB")
        time.set_ylim(bottom=0)
        time.set_title("time a pair, ms")
        for axis in (memory, time):
            _frame(axis, found)
        handles, labels = memory.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=4, frameon=False, labelcolor=GREY
        )
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


def _curve(axis: Any, points: Mapping[int, float], name: str) -> None:
    axis.plot(points.keys(), points.values(), "o-", label=name, color=COLOURS[name])


def _frame(axis: Any, found: Batches) -> None:
    pairs = list(found.plan.num_pairs)
    axis.set_xscale("log", base=2)
    axis.set_xticks(pairs, [str(num) for num in pairs])
    axis.set_xlabel("pairs in the batch", color=GREY)
    axis.title.set_color(GREY)
    axis.patch.set_alpha(0.0)
    axis.tick_params(colors=GREY, which="both")
    axis.grid(axis="y", alpha=0.25)
    for side, line in axis.spines.items():
        line.set_visible(side in ("left", "bottom"))
        line.set_color(GREY)
