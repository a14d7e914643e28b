"""What the examples draw: `--picture FILE` asks for it, and takes matplotlib (`gradbox[plot]`)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

HEIGHT = 2.6  # inches of a row of pictures


def wanted(doc: str | None) -> Path | None:
    """Read the command line: the file to draw to, if there is one."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw to a .png or .svg file")
    path: Path | None = parser.parse_args().picture
    return path


def curves(path: Path | None, panels: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw what changed from step to step: {what is measured: {name: values}}, side by side."""
    if path is None:
        return
    figure, axes = _figure(1, len(panels))
    for axis, (title, named) in zip(axes, panels.items(), strict=True):
        for name, values in named.items():
            axis.plot(values, ".-", label=name)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        if any(named):
            axis.legend(fontsize=8, frameon=False)
    _save(figure, path)


def matrices(path: Path | None, titled: Mapping[str, Tensor], *, symmetric: bool = False) -> None:
    """Draw matrices side by side; `symmetric` puts zero in the middle of the colours."""
    if path is None:
        return
    figure, axes = _figure(1, len(titled))
    for axis, (title, matrix) in zip(axes, titled.items(), strict=True):
        most = float(matrix.detach().abs().max())
        limits = {"vmin": -most, "vmax": most, "cmap": "RdBu_r"} if symmetric else {}
        shown = axis.imshow(matrix.detach().numpy(), aspect="auto", **limits)
        axis.set(title=title, xticks=[], yticks=[])
        figure.colorbar(shown, ax=axis)
    _save(figure, path)


def points(path: Path | None, x: Tensor, y: Tensor, *, labels: tuple[str, str], title: str) -> None:
    """Draw y over x, with the line on which they are equal."""
    if path is None:
        return
    figure, (axis,) = _figure(1, 1)
    axis.plot(x.flatten(), y.flatten(), ".", markersize=2, alpha=0.5)
    ends = [float(min(x.min(), y.min())), float(max(x.max(), y.max()))]
    axis.plot(ends, ends, color="black", linewidth=0.8)
    axis.set(xlabel=labels[0], ylabel=labels[1], title=title)
    _save(figure, path)


def digits(path: Path | None, rows: Sequence[Sequence[tuple[str, Tensor]]]) -> None:
    """Draw rows of captioned digits, each of 64 pixels."""
    if path is None:
        return
    figure, axes = _figure(len(rows), len(rows[0]), each=1.25)
    captioned = [item for row in rows for item in row]
    for axis, (caption, pixels) in zip(axes, captioned, strict=True):
        axis.imshow(pixels.detach().reshape(8, 8).numpy(), cmap="gray_r")
        axis.set(xticks=[], yticks=[])
        axis.set_title(caption, fontsize=8)
    _save(figure, path)


def _figure(rows: int, columns: int, *, each: float | None = None) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    size = (columns * (each or HEIGHT * 1.35), rows * (each or HEIGHT))
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=80)
    print(f"drawn to {path}")
