"""Models that lack parameters when a job begins, or leave gradients switched off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gradbox_engine import (
    BadInputs,
    Group,
    ModelCallFailed,
    Objective,
    mixed_gradient,
    set_gradient,
    set_outputs,
)
from gradbox_engine.per_sample import jacobian, per_sample_gradient
from tests.device import DEVICE
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written
from tests.oracle import TOLERANCE, difference


def _groups() -> list[Group]:
    numbers = torch.Generator().manual_seed(1)
    return [Group("z", [{"0": torch.randn(n, 5, generator=numbers)} for n in (3, 2)])]


def _loss(z: Tensor) -> Tensor:
    return z.square().sum()


def _mixed(model: nn.Module) -> Any:
    y = torch.ones((), requires_grad=True)
    inner = Objective(lambda y, v: (v**2).sum() * y, {"y": y}, {"y": y})
    return mixed_gradient(model, _groups()[0], inner, Objective(_loss))


JOBS: dict[str, Callable[[nn.Module], Any]] = {
    "gradient": lambda model: set_gradient(model, _groups(), Objective(_loss)),
    "outputs": lambda model: set_outputs(model, _groups()),
    "jacobian": lambda model: jacobian(model, _groups()[0].shards),
    "mixed": _mixed,
}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("lazy", [nn.LazyLinear(3), nn.LazyBatchNorm1d(affine=False)])
def test_a_lazy_module_that_was_never_called_is_refused_by_name(lazy: nn.Module, job: str) -> None:
    with pytest.raises(BadInputs, match="module '1': expected parameters of known shapes"):
        JOBS[job](nn.Sequential(nn.Linear(5, 5), lazy).to(DEVICE))


def _built_late(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "b"):
        m.b = nn.Linear(5, 3).to(x)
    found: Tensor = m.b(m.a(x))
    return found


@pytest.mark.parametrize("job", sorted(JOBS.keys() - {"mixed"}))
def test_a_layer_that_is_built_in_the_forward_pass_is_refused_by_name(job: str) -> None:
    model = Written(_built_late, a=nn.Linear(5, 5)).to(DEVICE)
    with pytest.raises(ModelCallFailed, match=r"parameter 'b\.weight': expected the model to have"):
        JOBS[job](model)
    assert [name for name, _ in model.named_parameters()] == ["a.weight", "a.bias"]


def _frozen_late(m: Any, x: Tensor) -> Tensor:
    m.scale = nn.Parameter(torch.full((), 2.0).to(x), requires_grad=False)
    found: Tensor = m.a(x) * m.scale
    return found


@pytest.mark.parametrize("job", ["gradient", "outputs"])
def test_a_frozen_parameter_that_is_made_in_the_forward_pass_needs_no_gradient(job: str) -> None:
    model = Written(_frozen_late, a=nn.Linear(5, 3)).to(DEVICE)
    JOBS[job](model)
    assert [name for name, _ in model.named_parameters()] == ["a.weight", "a.bias"]


def _hooked_late(m: Any, x: Tensor) -> Tensor:
    m.a.weight.register_hook(lambda g: g * 2)
    found: Tensor = m.a(x)
    return found


@pytest.mark.parametrize("job", ["gradient", "jacobian"])
def test_a_hook_on_a_parameter_from_the_forward_pass_is_refused_by_name(job: str) -> None:
    model = Written(_hooked_late, a=nn.Linear(5, 3)).to(DEVICE)
    with pytest.raises(ModelCallFailed, match=r"parameter 'a\.weight': expected its hooks to stay"):
        JOBS[job](model)
    assert not model.a.weight._backward_hooks


class _Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 2


def _parametrised_late(m: Any, x: Tensor) -> Tensor:
    if not parametrize.is_parametrized(m.a):
        parametrize.register_parametrization(m.a, "weight", _Doubled())
    found: Tensor = m.a(x)
    return found


def test_a_layer_that_is_parametrised_in_the_forward_pass_has_its_class_back() -> None:
    model = Written(_parametrised_late, a=nn.Linear(5, 3)).to(DEVICE)
    set_outputs(model, _groups())
    assert type(model.a) is nn.Linear
    assert model.a.weight is dict(model.named_parameters())["a.weight"]


def _without_grad_from_here(m: Any, x: Tensor) -> Tensor:
    found: Tensor = m.a(x)
    torch.set_grad_enabled(False)
    return found


def test_a_model_that_leaves_gradients_switched_off_has_them_in_the_readout_and_the_loss() -> None:
    layer = nn.Linear(5, 3).double().to(DEVICE)
    model = Written(_without_grad_from_here, a=layer)
    (group,) = _groups()
    shard = {"0": group.shards[0]["0"].double().to(DEVICE)}

    def squares(output: Tensor, _: Any) -> Tensor:
        return output.square()

    found = set_gradient(
        model, [Group("z", [shard])], Objective(lambda z: z.sum()), readout=squares
    )
    rows = per_sample_gradient(model, [shard], lambda z: z.sum(1), readout=squares).arrays
    with torch.enable_grad():
        losses = layer(shard["0"]).square().sum(1)[:, None]
        expected = naive.rows(losses, dict(model.named_parameters()))
    assert difference(rows, {name: x[:, 0] for name, x in expected.items()}) <= TOLERANCE
    assert (
        difference(found.grads, {name: x.sum((0, 1)) for name, x in expected.items()}) <= TOLERANCE
    )
