"""Rows of models of random layers, and of such models whose samples see each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradbox_engine.errors import CoupledSamples
from gradbox_engine.per_sample import jacobian
from gradbox_engine.per_sample.request import SampleResult
from tests.engine.drawn_models import DrawnModel, samples
from tests.engine.per_sample import naive

NUM_DRAWS = 60
COUPLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h - h.mean(0),
    "a thousandth": lambda h: h + 1e-3 * h.mean(0),
    "largest": lambda h: h - h.amax(0),
    "softmax": lambda h: h * h.softmax(0),
    "neighbour": lambda h: h + h.roll(1, 0),
    "running sum": lambda h: h.cumsum(0),
    "sorted": lambda h: h.sort(0).values,
    "the first": lambda h: h + h[:1],
    "the last": lambda h: h + h[-1:],
    "a mask": lambda h: h * (h > h.mean()),
    "ranks": lambda h: h * (1 + h.argsort(0)),
    "a count": lambda h: h * (h > 0).sum(0),
    "a mean without derivative": lambda h: h + h.mean(0).detach(),
    "a number": lambda h: h * (1 + h[0, 0, 0].item()),
    "which is largest": lambda h: h + h[h.sum((1, 2)).argmax()][None],
}


class CoupledModel(DrawnModel):
    """One of these models in which samples meet behind its first layer."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.coupling = self._of.choice(sorted(COUPLINGS))
        self._met = False

    def forward(self, x: Tensor) -> Tensor:
        self._met = False
        return super().forward(x)

    def between(self, name: str, h: Tensor) -> Tensor:
        if self._met:
            return h
        self._met = True
        return COUPLINGS[self.coupling](h)


def rows_of(result: SampleResult) -> Tensor:
    found = {
        name: result.arrays[name] if name in result.arrays else result.factors.block(name)
        for name in result.names
    }
    return naive.flat(found)


@pytest.mark.parametrize("seed", range(NUM_DRAWS))
def test_rows_are_those_of_naive_code(seed: int) -> None:
    model, inputs = DrawnModel(seed).train(seed % 2 == 0), samples(seed, [1 + seed % 4])
    expected = naive.flat(naive.jacobian(model, inputs[0]))
    form = ("dense", "factored", "auto")[seed % 3]
    result = jacobian(model, inputs, mode="train" if model.training else "eval", form=form)
    drawn = (model.names, model.pool, form)
    assert naive.difference(rows_of(result), expected) <= naive.TOLERANCE, drawn


@pytest.mark.parametrize("seed", range(NUM_DRAWS))
def test_samples_that_see_each_other_are_refused_or_their_rows_are_right(seed: int) -> None:
    model, inputs = CoupledModel(seed).eval(), samples(seed, [2 + seed % 4])
    try:
        result = jacobian(model, inputs)
    except CoupledSamples:
        return
    expected = naive.flat(naive.jacobian(model, inputs[0]))
    drawn = (model.names, model.pool, model.coupling)
    assert naive.difference(rows_of(result), expected) <= naive.TOLERANCE, drawn


def test_most_of_them_are_refused() -> None:
    refused = 0
    for seed in range(NUM_DRAWS):
        try:
            jacobian(CoupledModel(seed).eval(), samples(seed, [3]))
        except CoupledSamples:
            refused += 1
    assert refused > NUM_DRAWS / 2


def test_rows_that_data_choose_are_no_samples_though_there_are_as_many() -> None:
    """The positions that go to an expert are 3 of 3 samples, then 4 of 4, then 5 of 4."""
    with pytest.raises(CoupledSamples, match="replacing one sample"):
        jacobian(CoupledModel(1642).eval(), samples(1642, [3]))


def test_dropout_after_a_vectorised_layer_draws_what_it_draws_in_the_model() -> None:
    """An einsum over positions lies in memory with them outermost, its copy with the samples."""
    model, inputs = DrawnModel(22).train(), samples(22, [3])
    assert "mixed positions" in model.names
    result = jacobian(model, inputs, mode="train")
    assert any("vmap" in roads for roads in result.roads.values())
    torch.testing.assert_close(result.values, naive.outputs(model, inputs[0]), rtol=0, atol=1e-14)
