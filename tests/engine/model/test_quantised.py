"""Frozen weights that are made of other tensors, as quantised ones: no gradient, no obstacle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradbox_engine import Group, Objective, UnknownParameter, set_gradient
from gradbox_engine.per_sample import per_sample_gradient
from gradbox_worker.models.version import model_version
from tests.device import DEVICE, moved
from tests.engine.per_sample import naive
from tests.engine.quantised import Adapted
from tests.oracle import difference

NEAR = 1e-5  # float32
DENSE = ("base.bias", "down.weight", "up.weight")


def _loss(z: Tensor) -> Tensor:
    return z.square().mean()


def _shards() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [moved({"0": torch.randn(n, 6)}) for n in (3, 2)]


@pytest.mark.parametrize("retain", [0, 10**9])
def test_gradients_of_the_other_parameters_are_exact(retain: int) -> None:
    model, shards = Adapted().to(DEVICE), _shards()
    parameters = {name: model.get_parameter(name) for name in DENSE}
    _loss(torch.cat([model(shard["0"]) for shard in shards])).backward()
    expected = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    for weights in (None, {"up.weight": model.up.weight.detach().clone()}):
        found = set_gradient(
            model, [Group("z", shards)], Objective(_loss), retain=retain, weights=weights
        )
        assert found.grads.keys() == {*DENSE}
        assert difference(found.grads, expected) < NEAR


def test_rows_of_the_other_parameters_are_exact() -> None:
    model, (shard, _) = Adapted().to(DEVICE), _shards()
    value = model(shard["0"]).square().sum(1, keepdim=True)
    expected = naive.rows(value, {name: model.get_parameter(name) for name in DENSE})
    found = per_sample_gradient(model, [shard], lambda z: z.square().sum(1))
    assert not found.loops
    for name, rows in found.arrays.items():
        assert naive.difference(rows, expected[name][:, 0]) < NEAR


def test_a_quantised_weight_that_is_asked_for_is_refused() -> None:
    with pytest.raises(UnknownParameter, match=r"base\.weight"):
        set_gradient(Adapted(), [Group("z", _shards())], Objective(_loss), wrt=["base.weight"])


def test_the_version_depends_on_what_the_weight_is_made_of() -> None:
    model = Adapted()
    before = model_version(model)
    assert model_version(Adapted()) == before
    with torch.no_grad():
        model.base.weight.scale.mul_(2)
    assert model_version(model) != before
