"""Pictures of a result, drawn by matplotlib: gradient norms by layer, a Gram matrix, samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np

from gradbox.errors import InvalidInputs, InvalidJob
from gradbox.protocol import Receipt
from gradbox.results.row_reductions import PER_SAMPLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Kind = Literal["layers", "gram", "samples"]

# More bars than these cannot be read.
MOST_LAYERS: Final = 60
MOST_SAMPLES: Final = 20
# The height of a bar with a name beside it that can be read.
LABEL_INCHES: Final = 0.15


class Drawable(Protocol):
    """What a picture needs of a `GradResult`."""

    manifest: Receipt
    grads: Mapping[str, Any]

    def gram(self) -> Any: ...
    def gram_trace(self) -> Any: ...
    def norms(self) -> Any: ...


def plot(result: Drawable, kind: Kind | None, ax: Axes | None) -> Axes:
    """Draw a result; see `GradResult.plot`."""
    figure_and_axes = new_figure()
    picture = kind or _natural_kind(result)
    if picture not in _DRAW:
        raise InvalidInputs(f"plot: expected kind to be one of {[*_DRAW]}, got {kind!r}")
    if ax is not None:
        _DRAW[picture](result, ax)
        return ax
    figure, ax = figure_and_axes()
    _DRAW[picture](result, ax)
    figure.set_figheight(max(figure.get_figheight(), LABEL_INCHES * len(ax.get_yticks())))
    return ax


def new_figure() -> Callable[[], tuple[Any, Axes]]:
    """Return what makes a figure and its axes.

    Raises:
        InvalidJob: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise InvalidJob(
            "plot: expected matplotlib, which is not installed: pip install 'gradbox[plot]'"
        ) from error
    return lambda: pyplot.subplots(layout="constrained")


def _natural_kind(result: Drawable) -> Kind:
    if result.manifest.computation not in PER_SAMPLE:
        return "layers"
    if result.manifest.reduce in ("clipped_sum", "vjp"):
        return "layers"
    return "gram" if result.manifest.reduce in ("gram", "gram_trace") else "samples"


def _draw_layers(result: Drawable, ax: Axes) -> None:
    """One bar for every module: the norm of the gradient over its parameters, and over rows."""
    squares: dict[str, float] = {}
    for name, gradient in result.grads.items():
        layer = name.rpartition(".")[0] or name
        squares[layer] = squares.get(layer, 0.0) + _squared_norm(gradient[()])
    if not squares:
        raise InvalidJob(
            f"plot: expected gradients, got the result of a {result.manifest.computation} "
            f"without any; draw kind='gram' or 'samples' of a per-sample job"
        )
    norms = {layer: square**0.5 for layer, square in squares.items()}
    shown = sorted(norms, key=lambda layer: -norms[layer])[:MOST_LAYERS]
    layers = [layer for layer in norms if layer in set(shown)]
    ax.barh(layers, [norms[layer] for layer in layers])
    ax.invert_yaxis()
    ax.margins(y=0.01)
    ax.tick_params(axis="y", labelsize="x-small")
    ax.set_xlabel("norm of the gradient")
    positive = [norm for norm in norms.values() if norm > 0]
    if positive and max(positive) > 100 * min(positive):
        ax.set_xscale("log")
    left = len(norms) - len(layers)
    ax.set_title(f"Gradient norms by layer{f' ({left} smaller ones left out)' if left else ''}")


def _squared_norm(gradient: Any) -> float:
    """Return the sum of squares of a torch tensor or an array, in float64."""
    if isinstance(gradient, np.ndarray):
        return float(np.square(np.abs(gradient).astype(np.float64)).sum())
    return float(gradient.abs().double().square().sum())


def _draw_gram(result: Drawable, ax: Axes) -> None:
    outputs = result.manifest.computation == "jacobian"
    gram = np.asarray(result.gram_trace() if outputs else result.gram())
    largest = float(np.abs(gram).max(initial=0.0)) or 1.0
    image = ax.imshow(gram, cmap="RdBu_r", vmin=-largest, vmax=largest, interpolation="nearest")
    ax.figure.colorbar(image, ax=ax)
    ax.set_xlabel("sample")
    ax.set_ylabel("sample")
    ax.set_title("Inner products of rows" + (", summed over outputs" if outputs else ""))


def _draw_samples(result: Drawable, ax: Axes) -> None:
    norms = np.asarray(result.norms(), dtype=np.float64)
    if norms.ndim > 1:
        norms = np.sqrt(np.square(norms).sum(axis=tuple(range(1, norms.ndim))))
    order = np.argsort(-norms, kind="stable")[:MOST_SAMPLES]
    ax.bar([str(sample) for sample in order], norms[order])
    ax.axhline(float(np.median(norms)), linestyle="--", color="0.5", label="median of all")
    ax.legend()
    ax.set_xlabel("sample")
    ax.set_ylabel("norm of its row")
    ax.set_title(f"The largest of {len(norms)} samples")


_DRAW: Final[dict[str, Callable[[Any, Any], None]]] = {
    "layers": _draw_layers,
    "gram": _draw_gram,
    "samples": _draw_samples,
}
