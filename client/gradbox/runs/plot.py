"""A picture of a run's history, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

from gradbox.errors import InvalidInputs
from gradbox.protocol import StepView
from gradbox.results.plot import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = Literal["loss", "grad_norm", "lr", "seconds"]

LABELS: Final[dict[str, str]] = {
    "loss": "loss",
    "grad_norm": "norm of the gradient",
    "lr": "learning rate",
    "seconds": "seconds a step",
}


def plot_history(steps: Sequence[StepView], kind: Curve, ax: Axes | None) -> Axes:
    """Draw one of a run's curves; see `TrainRun.plot`."""
    figure_and_axes = new_figure()
    if kind not in LABELS:
        raise InvalidInputs(f"plot: expected kind to be one of {[*LABELS]}, got {kind!r}")
    found = [(step.number, getattr(step, kind)) for step in steps]
    shown = [(number, value) for number, value in found if value is not None]
    if ax is None:
        _, ax = figure_and_axes()
    # A rate for each group of the optimizer is a curve of its own.
    ax.plot([number for number, _ in shown], [value for _, value in shown], label=kind)
    ax.set_xlabel("step")
    ax.set_ylabel(LABELS[kind])
    return ax
