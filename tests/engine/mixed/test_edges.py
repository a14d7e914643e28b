"""Mixed gradients at the edges: what is refused, what is put back, what may be asked for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gradbox_engine import (
    BadInputs,
    BadOutput,
    Group,
    LossNotFinite,
    LossNotScalar,
    ModelCallFailed,
    Objective,
    ReplayMismatch,
    mixed_gradient,
)
from tests.device import DEVICE
from tests.engine.mixed.running import mixed_answer
from tests.mixed_cases import (
    MIXED_CASES,
    TOLERANCE,
    MixedCase,
    cubic,
    double_backward,
    normal,
    penalty,
    vector,
)
from tests.oracle import difference


def mlp() -> object:
    return MIXED_CASES["mlp, cubic"]()


def narrow(case: MixedCase, **others: Any) -> MixedCase:
    """Return the case in float32."""
    return replace(
        case,
        model=lambda: case.model().float(),
        shards=[{"0": shard["0"].float()} for shard in case.shards],
        y={"y": case.y["y"].detach().float()},
        **others,
    )


class Drifting(nn.Module):
    """Counts its calls in an object of its own, and adds them to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)
        self.calls = itertools.count(1)

    def forward(self, x):
        return self.linear(x) + next(self.calls)


class Detached(nn.Module):
    def forward(self, x):
        return x.detach()[:, :3]


def _fails_on_three(v, y):
    if v.shape[0] == 1:
        raise ZeroDivisionError("three")
    return cubic(y, v)


REFUSED = {
    "no argument with a derivative": (
        {"shards": [{"0": torch.arange(3)}], "z": None},
        BadInputs,
        "an integer argument has no derivative",
    ),
    "an argument that is not there": ({"z": "image"}, BadInputs, r"one of \['0'\], got z='image'"),
    "shards of several shapes": (
        {
            "model": lambda: nn.Identity(),
            "shards": normal((2,), 3) + normal((2,), 4),
            "inner": lambda v, y: v.pow(3).sum() * y.sum(),
        },
        BadInputs,
        "pad them",
    ),
    "an output that z does not reach": ({"model": Detached}, BadOutput, "depends on the argument"),
    "inner with many values": (
        {"inner": lambda v, y: v @ y},
        LossNotScalar,
        r"inner: expected .* got .*\(3,\)",
    ),
    "outer with many values": ({"outer": lambda dfdz: dfdz.sum(0)}, LossNotScalar, "outer: exp"),
    "inner that is constant": ({"inner": lambda v, y: v.detach().sum()}, BadInputs, "inner: exp"),
    "outer that is constant": ({"outer": lambda dfdz: torch.ones(())}, BadInputs, "outer: exp"),
    "outer without a value": (
        {"outer": lambda dfdz: dfdz.sum().log() * torch.nan},
        LossNotFinite,
        "outer: expected a finite number",
    ),
    "inner that raises": ({"inner": _fails_on_three}, ModelCallFailed, "shard 2: inner raised"),
    "a model with a hidden counter": ({"model": Drifting}, ReplayMismatch, "counter in an object"),
    "nothing to differentiate by": ({"y": {}, "inner": lambda v: v.sum()}, BadInputs, "at least"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused(name):
    terms, error, message = REFUSED[name]
    case = replace(mlp(), **terms)
    with pytest.raises(error, match=message):
        mixed_answer(case)


def test_one_name_for_two_leaves_is_refused():
    a, b = (vector(3).requires_grad_() for _ in range(2))
    with pytest.raises(BadInputs, match=r"'y' to be one tensor"):
        mixed_gradient(
            mlp().model(),
            Group("z", mlp().shards),
            Objective(cubic, {"y": a}, {"y": a}),
            Objective(penalty, {}, {"y": b}),
        )


@pytest.mark.parametrize("ends", ["well", "in an error"])
def test_the_model_is_left_as_it_was(ends):
    case = MIXED_CASES["cnn in train"]()
    model = case.model().to(DEVICE).eval()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if ends == "well":
        mixed_answer(case, model)
    else:
        with pytest.raises(LossNotFinite):
            mixed_answer(replace(case, outer=lambda dfdz: dfdz.sum() * torch.nan), model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert first.grad.unique().tolist() == [1]
    assert not model.training
    assert not model._forward_hooks


def test_leaves_are_left_as_they_were():
    case = narrow(mlp())
    y = case.y["y"]
    leaf = y.detach()
    result = mixed_answer(case, precision="fp64")
    assert result.grads["y.y"].dtype == torch.float64
    assert y.dtype == torch.float32
    assert y.data_ptr() == leaf.data_ptr()
    assert y.grad is None


def test_fp64_widens_model_shards_and_y():
    case = mlp()
    rounded = replace(
        case,
        model=lambda: case.model().float().double(),
        shards=[{"0": shard["0"].float().double()} for shard in case.shards],
        y={"y": case.y["y"].detach().float().double()},
    )
    result = mixed_answer(narrow(case), precision="fp64")
    assert difference(result.grads, double_backward(rounded).grads) <= TOLERANCE


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-1), ("fp16", 2e-2)]
)
def test_narrow_arithmetic_gives_nearly_the_same(precision, tolerance):
    case = MIXED_CASES["generator in eval"]()
    result = mixed_answer(narrow(case), precision=precision)
    assert result.fallbacks == {}
    assert result.grads["y.y"].dtype == torch.float32
    assert difference(result.grads, double_backward(case).grads) <= tolerance


def test_half_precision_keeps_tiny_cotangents():
    case = MIXED_CASES["generator in eval"]()
    tiny = narrow(
        case,
        inner=lambda v, y: 1e-9 * cubic(y, v),
        outer=lambda dfdz: dfdz.mul(1e9).sin().sum(),
    )
    exact = replace(case, outer=lambda dfdz: dfdz.sin().sum())
    result = mixed_answer(tiny, precision="fp16")
    assert difference(result.grads, double_backward(exact).grads) <= 5e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(2.0**-90, 2.0**30), (2.0**-60, 1.0), (1.0, 2.0**40)])
def test_the_sizes_of_inner_and_outer_do_not_show(dtype, sizes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).to(dtype)
    group = Group("z", [{"0": torch.randn(3, 4).to(dtype)} for _ in range(2)])
    y = torch.linspace(-1, 1, 5, requires_grad=True)

    def answer(a, b):
        inner = Objective(lambda y, v: a * (y * v.float().tanh()).sum(), {"y": y}, {"y": y})
        outer = Objective(lambda dfdz: b * (dfdz / a).square().sum())
        return mixed_gradient(model, group, inner, outer)

    found, expected = answer(*sizes), answer(1.0, 1.0)
    assert not found.fallbacks
    near = 1e-2 if dtype == torch.float16 else 1e-6
    assert found.value / sizes[1] == pytest.approx(expected.value, rel=near)
    assert difference({"y": found.grads["y"] / sizes[1]}, expected.grads) < near


def test_weights_are_laid_over_for_the_job():
    case = mlp()
    weights = {"0.bias": torch.ones(8, dtype=torch.float64)}

    def changed() -> nn.Module:
        model = case.model()
        model.load_state_dict(weights, strict=False)
        return model

    expected = double_backward(replace(case, model=changed))
    assert difference(mixed_answer(case, weights=weights).grads, expected.grads) <= TOLERANCE


def test_order_permutes_what_outer_sees():
    case = replace(mlp(), outer=lambda dfdz, target: (dfdz.sum(1) * target).sum().sin())
    weights, order = vector(7), torch.randperm(7)
    expected = double_backward(replace(case, x={"target": weights}))
    y = case.y["y"].requires_grad_()
    result = mixed_gradient(
        case.model().to(DEVICE),
        Group("z", case.shards, order=order),
        Objective(case.inner, {"y": y}, {"y.y": y}),
        Objective(case.outer, {"target": weights[order]}),
        seed=case.seed,
        mode=case.mode,
        returns=("dfdz",),
    )
    assert difference(result.grads, expected.grads) <= TOLERANCE
    torch.testing.assert_close(result.dfdz, expected.dfdz[order])


def test_shards_that_outer_does_not_see_have_no_tangent_pass():
    case = replace(mlp(), outer=lambda dfdz: dfdz[:3].square().sum().sin())
    result = mixed_answer(case)
    assert (result.shards["z"], result.tangents) == (3, 1)
    assert difference(result.grads, double_backward(case).grads) <= TOLERANCE


def test_streams_of_samples_make_the_cut_into_shards_irrelevant():
    case = mlp()
    rows = torch.cat([shard["0"] for shard in case.shards])
    cuts = [case.shards, [{"0": part} for part in rows.split((1, 4, 2))]]
    first, second = (
        mixed_answer(replace(case, shards=cut), streams="sample").grads for cut in cuts
    )
    assert difference(second, first) <= TOLERANCE
    assert difference(mixed_answer(case).grads, first) > 1e-3


class Steps:
    def __init__(self, stop_at: tuple[str, int] | None = None) -> None:
        self.seen: list[tuple[str, int, int]] = []
        self._stop_at = stop_at

    def step(self, phase: str, done: int, total: int) -> None:
        self.seen.append((phase, done, total))
        if (phase, done) == self._stop_at:
            raise KeyboardInterrupt


def test_the_observer_is_told_of_every_shard():
    steps = Steps()
    mixed_answer(mlp(), observer=steps)
    shards = [(index, 3) for index in range(4)]
    assert steps.seen == [
        *(("forward", *shard) for shard in shards),
        ("cotangents", 0, 1),
        ("cotangents", 1, 1),
        *(("replay", *shard) for shard in shards),
    ]


@pytest.mark.parametrize("phase", ["forward", "replay"])
def test_an_observer_may_stop_the_job(phase):
    case = MIXED_CASES["cnn in train"]()
    model = case.model().to(DEVICE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        mixed_answer(case, model, observer=Steps((phase, 1)))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
