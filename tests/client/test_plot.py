"""`result.plot()`: what each kind of result draws."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from gradbox import Gradient, GradResult, InvalidInputs, InvalidJob, Jacobian, PerSampleGradient
from tests.boxes import TestBox

SHARDS = [torch.linspace(-1, 2, 30).reshape(6, 5).double()]


@pytest.fixture(autouse=True)
def pyplot() -> Iterator[ModuleType]:
    """matplotlib that draws into memory; whatever a test drew is closed behind it."""
    import matplotlib as mpl
    from matplotlib import pyplot

    mpl.use("agg")
    yield pyplot
    pyplot.close("all")


def per_sample(box: TestBox, **given: object) -> GradResult:
    computation = PerSampleGradient(
        model="mlp", inputs=SHARDS, loss=lambda z: z.square().sum(1), **given
    )
    with box.client() as client:
        return client.submit(computation).result(60)


def test_a_gradient_draws_a_bar_for_each_layer(twin: TestBox) -> None:
    with twin.client() as client:
        gradient = Gradient(model="mlp", inputs=SHARDS, loss=lambda z: z.square().sum())
        result = client.submit(gradient).result(60)
    ax = result.plot()
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["0", "2", "4"]
    norms = [bar.get_width() for bar in ax.patches]
    last = torch.cat([result.grads[name].flatten() for name in ("4.weight", "4.bias")])
    assert norms[2] == pytest.approx(last.norm().item())
    with pytest.raises(InvalidJob):
        result.plot("gram")
    with pytest.raises(InvalidInputs, match="layers"):
        result.plot("pie")  # type: ignore[arg-type]


def test_the_names_of_a_transformers_layers_can_be_read(real: TestBox) -> None:
    ids = torch.ones(1, 4, dtype=torch.int64)
    gradient = Gradient(
        model="minilm", inputs=[{"input_ids": ids}], output="last_hidden_state", loss=torch.sum
    )
    with real.client() as client:
        ax = client.run(gradient).plot()
    ax.figure.canvas.draw()
    names = [label.get_window_extent() for label in ax.get_yticklabels()]
    assert len(names) > 50
    assert all(above.y0 > below.y1 for above, below in pairwise(names))
    assert min(name.x0 for name in names) >= 0


def test_rows_draw_their_largest_samples(twin: TestBox) -> None:
    result = per_sample(twin)
    ax = result.plot()
    heights = [bar.get_height() for bar in ax.patches]
    assert heights == sorted(result.norms().tolist(), reverse=True)
    assert ax.get_xticklabels()[0].get_text() == str(int(result.norms().argmax()))
    assert len(result.plot("layers").patches) == 3


def test_a_gram_matrix_is_an_image(twin: TestBox, pyplot: ModuleType) -> None:
    result = per_sample(twin, reduce="gram")
    _, given = pyplot.subplots()
    ax = result.plot(ax=given)
    assert ax is given
    assert ax.images[0].get_array().shape == (6, 6)


def test_a_jacobian_is_summed_over_outputs(twin: TestBox) -> None:
    with twin.client() as client:
        result = client.submit(Jacobian(model="mlp", inputs=SHARDS, form="factored")).result(60)
    drawn = torch.as_tensor(result.plot("gram").images[0].get_array().copy())
    torch.testing.assert_close(drawn, result.gram_trace())
    assert len(result.plot("samples").patches) == 6
    assert len(result.plot("layers").patches) == 3


def test_without_matplotlib_it_says_what_to_install() -> None:
    code = """
import sys
sys.modules["matplotlib"] = None
from gradbox.errors import InvalidJob
from gradbox.results.plot import plot
try:
    plot(None, None, None)
except InvalidJob as error:
    assert "gradbox[plot]" in str(error), error
else:
    raise SystemExit("drew without matplotlib")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)
