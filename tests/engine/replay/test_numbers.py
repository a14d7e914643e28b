"""Overlays and precisions: other numbers in the same model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from gradbox_engine import Group, Objective, Penalty, ReplayMismatch, set_gradient
from gradbox_engine.model.comparison import ReplayComparison
from tests import case_models
from tests.cases import CASES, Case
from tests.device import AGAINST_FP64, DEVICE, REPLAYED, same_bits
from tests.engine.replay.running import answer
from tests.oracle import TOLERANCE, difference, naive

NEAR = AGAINST_FP64[DEVICE.type]


def _pulled(z: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient has no part that is zero but for rounding."""
    return (z @ z.T).square().mean() + z.sum(0).exp().mean()


def _single(case: Case) -> tuple[nn.Module, dict[str, list[dict[str, torch.Tensor]]]]:
    groups = {
        name: [
            {k: v.float() if v.is_floating_point() else v for k, v in shard.items()}
            for shard in shards
        ]
        for name, shards in case.groups.items()
    }
    return case.model().float().to(DEVICE), groups


def _answer_single(name: str, *, loss=None, **terms):
    case = CASES[name]()
    model, groups = _single(case)
    told = {"seed": case.seed, "mode": case.mode, "output": case.output, "readout": case.readout}
    members = [Group(group, shards) for group, shards in groups.items()]
    return set_gradient(model, members, Objective(loss or case.loss), **(told | terms))


def test_a_frozen_transformer_runs_by_the_kernels_of_one_with_a_graph():
    def outputs(wrt: list[str]) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten())
        group = Group("z", [{"0": torch.randn(4, 6, 8)}])
        objective = Objective(torch.var)
        told = {"wrt": wrt, "returns": ("outputs",)}
        return set_gradient(model.to(DEVICE), [group], objective, **told).outputs["z"]

    assert same_bits(outputs(["0.norm2.bias"]), outputs(["*"]))


def test_weights_of_a_job_are_used_for_it_alone():
    case = CASES["cnn in eval"]()
    other = case_models.cnn()
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            if tensor.is_floating_point():
                tensor.add_(0.1)
    overlay = {name: t for name, t in other.state_dict().items() if not name.startswith("9.")}
    overlay |= {name: t for name, t in case_models.cnn().state_dict().items() if "9." in name}
    expected = answer(case, _loaded(overlay))
    result = answer(case, weights={n: t for n, t in overlay.items() if "9." not in n})
    assert same_bits(result.grads["0.weight"], expected.grads["0.weight"])
    assert difference(answer(case).grads, naive(case).grads) <= TOLERANCE


def _loaded(state: dict[str, torch.Tensor]) -> nn.Module:
    model = case_models.cnn()
    model.load_state_dict(state)
    return model


def test_a_forward_pass_does_not_write_to_the_overlay():
    weights = {"1.running_mean": torch.zeros(4, dtype=torch.float64)}
    result = answer(CASES["cnn in train"](), weights=weights)
    assert weights["1.running_mean"].eq(0).all()
    assert result.buffers["1.running_mean"].ne(0).any()


@pytest.mark.parametrize("precision", NEAR)
@pytest.mark.parametrize("name", ["mlp", "transformer", "cnn in eval"])
def test_every_precision_is_near_the_gradient_in_float64(name, precision):
    # Without dropout, whose masks are drawn differently for each dtype.
    exact = _answer_single(name, mode="eval", precision="fp64", loss=_pulled)
    result = _answer_single(name, mode="eval", precision=precision, loss=_pulled)
    assert {gradient.dtype for gradient in result.grads.values()} == {torch.float32}
    assert difference(result.grads, exact.grads) < NEAR[precision]
    assert result.loss == pytest.approx(exact.loss, rel=NEAR[precision])


def test_widening_reaches_a_recurrent_layers_own_list_of_weights():
    case = CASES["lstm"]()
    result = _answer_single("lstm", precision="fp64")
    model, groups = _single(case)
    wide = {k: [{n: v.double() for n, v in s.items()} for s in g] for k, g in groups.items()}
    expected = answer(dataclasses.replace(case, groups=wide), model.double())
    assert difference(result.grads, expected.grads) <= TOLERANCE


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["mlp", "transformer", "cnn in train", "spectral norm"])
def test_a_replay_under_autocast_repeats_the_first_pass(name, precision):
    assert _answer_single(name, precision=precision).replay_difference <= REPLAYED


def test_autocast_is_on_in_both_passes():
    seen: list[torch.dtype] = []
    case = CASES["mlp"]()
    model, groups = _single(case)
    model[0].register_forward_hook(lambda _module, _inputs, out: seen.append(out.dtype))
    group = Group("z", groups["z"])
    set_gradient(model, [group], Objective(case.loss), precision="bf16")
    assert seen == [torch.bfloat16] * 7


def test_the_loss_gets_z_in_float32():
    dtypes = []

    def loss(z):
        dtypes.append(z.dtype)
        return z.var()

    model = case_models.mlp().bfloat16()
    shards = [{"0": torch.ones(2, 5, dtype=torch.bfloat16)}] * 2
    result = set_gradient(model, [Group("z", shards)], Objective(loss))
    assert dtypes == [torch.float32]
    assert {gradient.dtype for gradient in result.grads.values()} == {torch.float32}


def test_sixteen_bit_gradients_are_summed_in_float32():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    shards = [{"0": torch.ones(1, 1, dtype=torch.bfloat16)}] * 400
    result = set_gradient(model, [Group("z", shards)], Objective(torch.sum))
    assert result.grads["weight"].item() == 400  # in bfloat16 the sum would stay at 256


@pytest.mark.parametrize("factor", [2.0**-40, 1.0, 2.0**14])
def test_the_scale_of_fp16_does_not_show(factor):
    case = CASES["mlp"]()
    model, groups = _single(case)

    def gradient(scale: float):
        objective = Objective(lambda z: z.square().mean() * scale)
        return set_gradient(model, [Group("z", groups["z"])], objective, precision="fp16").grads

    scaled = {name: g / factor for name, g in gradient(factor).items()}
    assert difference(scaled, gradient(1.0)) < 1e-6


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e8])
def test_float16_parameters_have_gradients_that_float16_does_not_hold(size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).half()
    shards = [{"0": torch.randn(3, 4).half()} for _ in range(2)]
    objective = Objective(lambda z: z.square().mean() * size)
    exact = set_gradient(model, [Group("z", shards)], objective, precision="fp64")
    result = set_gradient(model, [Group("z", shards)], objective)
    assert difference(result.grads, exact.grads) < NEAR["fp16"]


def test_fp16_tries_a_smaller_scale_where_gradients_overflow():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(8.0 if "weight" in name else 0.0)
    shards = [{"0": torch.full((2, 4), 2.0**-8)}] * 3
    objective = Objective(torch.sum)
    exact = set_gradient(model, [Group("z", shards)], objective, precision="fp64")
    result = set_gradient(model, [Group("z", shards)], objective, precision="fp16")
    assert difference(result.grads, exact.grads) < NEAR["fp16"]


@pytest.mark.parametrize("size", [1e-10, 1.0, 1e10])
def test_fp16_finds_the_scale_of_a_penalty_far_larger_than_the_loss(size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    shards = [{"0": torch.randn(3, 4)} for _ in range(2)]
    penalty = Penalty("0", lambda tap: tap.square().sum(), weight=1e8 * size)
    told = {"objective": Objective(lambda z: z.square().mean() * size), "penalties": [penalty]}
    exact = set_gradient(model, [Group("z", shards)], wrt=["0.*"], precision="fp64", **told)
    result = set_gradient(model, [Group("z", shards)], wrt=["0.*"], precision="fp16", **told)
    assert difference(result.grads, exact.grads) < NEAR["fp16"]


def test_gradients_beside_one_that_is_finite_at_no_scale_are_right():
    class Rooted(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x).abs().sqrt())

    torch.manual_seed(0)
    model = Rooted(nn.Linear(4, 6, bias=False), nn.Linear(6, 3))
    shards = [{"x": torch.zeros(2, 4)}, {"x": torch.rand(3, 4)}]
    objective = Objective(lambda z: z.square().mean() * 1e-6)
    exact = set_gradient(model, [Group("z", shards)], objective, precision="fp64").grads
    grads = set_gradient(model, [Group("z", shards)], objective, precision="fp16").grads
    assert not grads.pop("0.weight").isfinite().any()
    assert difference(grads, {name: exact[name] for name in grads}) < NEAR["fp16"]


def test_the_largest_difference_is_told_and_one_beyond_the_tolerance_is_an_error():
    first = torch.tensor([1.0, -2.0], dtype=torch.float64)
    comparison = ReplayComparison("fp32")
    for factor in (1 + 1e-12, 1 + 1e-14):
        comparison.compare("shard 0", {"": first * factor}, {"": first})
    assert comparison.finish() == pytest.approx(1e-12, rel=1e-2, abs=0)
    with pytest.raises(ReplayMismatch, match="shard 1"):
        comparison.compare("shard 1", {"": first * 1.001}, {"": first})
