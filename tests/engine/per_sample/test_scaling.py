"""Rows under float16 autocast, whose losses may be far smaller than float16 reaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import jacobian, per_sample_gradient
from tests.engine.per_sample import naive

TOLERANCE = 5e-3
"""Largest relative difference of a row under float16 autocast."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("size", [1e-12, 1e-9, 1e-6, 1.0, 1e6])
def test_rows_in_fp16_do_not_depend_on_the_size_of_the_loss(size: float) -> None:
    net, x = model(), torch.randn(6, 5)

    def loss(z: Tensor, weight: Tensor) -> Tensor:
        return z.square().sum(1) * weight

    # Samples of one shard may differ in size, though not by as much as float16 has digits.
    weight = size * torch.tensor([1.0, 1e-1, 1e1, 1.0, 0.0, 1.0])
    found = per_sample_gradient(
        net, [{"0": x[:4]}, {"0": x[4:]}], loss, loss_inputs={"weight": weight}, precision="fp16"
    )
    exact = model().double()
    losses = loss(exact(x.double()), weight.double())
    rows = naive.flat(naive.rows(losses[:, None], dict(exact.named_parameters())))[:, 0]
    mine = naive.flat(found.arrays, 1).double()
    for row, expected in zip(mine, rows, strict=True):
        assert naive.difference(row, expected) < TOLERANCE
    assert found.values is not None
    torch.testing.assert_close(found.values.double(), losses.detach(), rtol=5e-3, atol=0)


def test_reductions_of_a_small_loss_in_fp16_are_those_of_its_rows() -> None:
    net, x = model(), torch.randn(6, 3, 5)

    def loss(z: Tensor) -> Tensor:
        return z.square().sum((1, 2)) * 1e-9

    dense = per_sample_gradient(net, [{"0": x}], loss, precision="fp16")
    rows = naive.flat(dense.arrays, 1)
    gram = per_sample_gradient(net, [{"0": x}], loss, precision="fp16", reduce="gram")
    assert naive.difference(gram.arrays["gram"], rows @ rows.T) < 1e-4
    norms = per_sample_gradient(net, [{"0": x}], loss, precision="fp16", reduce="norm")
    assert naive.difference(norms.arrays["norm"].float(), rows.norm(dim=1)) < 1e-4


def test_a_convolution_and_an_embedding_have_rows_of_a_small_loss_in_fp16() -> None:
    torch.manual_seed(0)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.c, self.n = nn.Embedding(7, 4), nn.Conv1d(4, 4, 3), nn.LayerNorm(4)
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, ids: Tensor) -> Tensor:
            h: Tensor = self.c(self.e(ids).mT).mT
            return self.n(h.tanh()).tanh().mean(1) * self.gain

    net, ids = Both(), torch.randint(0, 7, (5, 6))

    def loss(z: Tensor) -> Tensor:
        return z[:, 0] * 1e-9

    found = per_sample_gradient(net, [{"0": ids}], loss, precision="fp16").arrays
    expected = per_sample_gradient(net.double(), [{"0": ids}], loss).arrays
    for name, rows in expected.items():
        assert naive.difference(found[name].double(), rows) < 1e-2, name


def test_cotangents_that_fp16_does_not_reach_are_pulled_back() -> None:
    net, x = model(), torch.randn(6, 5)
    u = torch.randn(6, 3) * 1e-9
    found = jacobian(net, [{"0": x}], reduce="vjp", vectors=u, precision="fp16").arrays
    expected = jacobian(net, [{"0": x}], reduce="vjp", vectors=u).arrays
    for name, gradient in expected.items():
        assert naive.difference(found[name], gradient) < TOLERANCE


def test_slopes_of_very_many_outputs_do_not_overflow_where_they_are_added() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 200_000)), torch.randn(2, 5)
    with torch.no_grad():
        net[1].weight.abs_().clamp_min_(0.5)

    def loss(z: Tensor) -> Tensor:
        return z.mean(1) * 1e-3

    found = per_sample_gradient(net, [{"0": x}], loss, precision="fp16", wrt=["0.*"]).arrays
    expected = per_sample_gradient(net, [{"0": x}], loss, wrt=["0.*"]).arrays
    for name, rows in expected.items():
        assert naive.difference(found[name], rows) < TOLERANCE


class Amplifier(nn.Module):
    """A model whose gradients grow more than float16 spans above 1."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.b(self.a(x).tanh() * 150) * 150
        return z


def test_samples_whose_gradients_overflow_run_again_with_smaller_scales() -> None:
    torch.manual_seed(0)
    net, x = Amplifier(), torch.randn(6, 5)
    x[2] = float("nan")  # one that stays what it is

    def loss(z: Tensor) -> Tensor:
        return z.sum(1) * 1e-4

    shards = [{"0": x[:4]}, {"0": x[4:]}]
    found = per_sample_gradient(net, shards, loss, precision="fp16", unchecked=["coupling"])
    expected = per_sample_gradient(net, shards, loss, unchecked=["coupling"]).arrays
    sound = [0, 1, 3, 4, 5]
    for name, rows in expected.items():
        assert naive.difference(found.arrays[name][sound], rows[sound]) < TOLERANCE
        assert name == "b.bias" or found.arrays[name][2].isnan().any()


def test_rows_of_float16_parameters_that_float16_holds_are_not_zero() -> None:
    """Where the scale's inverse is below what float16 holds."""
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3).half(), torch.randn(4, 5).half()
    scale = 1e-7
    result = per_sample_gradient(
        model, [{"0": x}], lambda z: scale * z.square().sum(1), precision="fp16"
    )
    expected = 2 * scale * model(x).detach().double()
    spacing = 2.0**-24
    assert float(expected.abs().max()) > spacing
    assert float((result.arrays["bias"].double() - expected).abs().max()) <= spacing


@pytest.mark.parametrize("size", [1e-7, 1e-4, 1.0])
def test_rows_of_float16_parameters_are_right_by_their_rules_whatever_the_precision(
    size: float,
) -> None:
    net, x = model().half(), torch.randn(6, 5).half()

    def loss(z: Tensor) -> Tensor:
        return z.square().sum(1) * size

    result = per_sample_gradient(net, [{"0": x}], loss)
    assert not result.loops
    expected = per_sample_gradient(net, [{"0": x}], loss, precision="fp64").arrays
    spacing = 2.0**-24
    for name, rows in expected.items():
        near = TOLERANCE * float(rows.norm()) + spacing * rows.numel() ** 0.5
        assert float((result.arrays[name] - rows).norm()) <= near


class Gained(nn.Module):
    """A model with a parameter without dims, whose gradients grow where `gain` is large."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.b(self.a(x).tanh() * self.gain) * self.gain
        return z


@pytest.mark.parametrize("size", [1e-9, 1.0])
@pytest.mark.parametrize("gain", [1.0, 150.0])
def test_cotangents_are_pulled_back_through_float16_without_overflow(
    gain: float, size: float
) -> None:
    net, x, u = Gained(gain), torch.randn(6, 5), torch.randn(6, 3) * size
    found = jacobian(net, [{"0": x}], reduce="vjp", vectors=u, precision="fp16").arrays
    expected = jacobian(net, [{"0": x}], reduce="vjp", vectors=u).arrays
    for name, gradient in expected.items():
        assert found[name].shape == gradient.shape
        assert naive.difference(found[name], gradient) < TOLERANCE


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_what_is_pulled_back_to_float16_parameters_is_float16(precision: str) -> None:
    net, x, u = Gained(1.0).half(), torch.randn(6, 5).half(), torch.randn(6, 3)
    found = jacobian(net, [{"0": x}], reduce="vjp", vectors=u, precision=precision).arrays
    assert {gradient.dtype for gradient in found.values()} == {torch.float16}


class Rooted(nn.Module):
    """A model in whose first layer an input of zero has gradients that are not finite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.b(self.a(x).abs().sqrt())
        return z


def test_rows_beside_one_that_is_finite_at_no_scale_are_right() -> None:
    net, x = Rooted(), torch.rand(4, 3)
    x[1] = 0
    found, expected = (
        per_sample_gradient(net, [{"0": x}], lambda z: z.square().sum(1), precision=precision)
        for precision in ("fp16", "fp64")
    )
    for name, rows in expected.arrays.items():
        finite = rows.isfinite()
        assert finite.all() == (name != "a.weight")
        assert torch.equal(found.arrays[name].isfinite(), finite)
        assert naive.difference(found.arrays[name][finite], rows[finite]) < TOLERANCE


def test_what_is_pulled_back_beside_a_gradient_that_is_finite_at_no_scale_is_right() -> None:
    net, x, u = Rooted(), torch.rand(4, 3), torch.randn(4, 2)
    x[1] = 0
    found = jacobian(net, [{"0": x}], reduce="vjp", vectors=u, precision="fp16").arrays
    expected = jacobian(net, [{"0": x}], reduce="vjp", vectors=u).arrays
    assert not found["a.weight"].isfinite().any()
    for name in ("b.weight", "b.bias"):
        assert naive.difference(found[name], expected[name]) < TOLERANCE


def test_tangents_that_float16_does_not_hold_reach_float16_parameters() -> None:
    net, x = model().half(), torch.randn(6, 5).half()
    tangents = {name: torch.full(p.shape, 2.0**-40) for name, p in net.named_parameters()}
    larger = {name: torch.ones(p.shape) for name, p in net.named_parameters()}
    found = jacobian(net, [{"0": x}], reduce="jvp", vectors=tangents).arrays["jvp"]
    expected = jacobian(net, [{"0": x}], reduce="jvp", vectors=larger).arrays["jvp"]
    assert torch.equal(found * 2.0**40, expected)


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e6])
def test_reductions_of_float16_rows_need_not_fit_float16(size: float) -> None:
    net, x = model().half(), torch.randn(6, 5).half()

    def reduced(**given: Any) -> Tensor:
        def loss(z: Tensor) -> Tensor:
            return z.square().sum(1) * size

        found = per_sample_gradient(net, [{"0": x[:4]}, {"0": x[4:]}], loss, **given).arrays
        return torch.cat([array.double().flatten() / size for array in found.values()])

    for given in ({"reduce": "norm"}, {"reduce": "projection", "dim": 8}):
        assert naive.difference(reduced(**given), reduced(**given, precision="fp64")) < TOLERANCE
    clipped = {"reduce": "clipped_sum", "clip": 0.1}
    if size >= 1:
        found, expected = (reduced(**clipped, **given) for given in ({}, {"precision": "fp64"}))
        assert naive.difference(found, expected) < TOLERANCE


@pytest.mark.parametrize("reduce", ["clipped_sum", "vjp"])
def test_sums_of_rows_of_16_bits_over_shards_are_wide(reduce: str) -> None:
    net = nn.Linear(1, 1, bias=False).bfloat16()
    shards = [{"0": torch.ones(1, 1).bfloat16()}] * 400
    if reduce == "vjp":
        found = jacobian(net, shards, reduce="vjp", vectors=torch.ones(400, 1))
    else:
        found = per_sample_gradient(net, shards, lambda z: z[:, 0], reduce=reduce, clip=9.0)
    assert found.arrays["weight"].item() == 400  # in bfloat16 the sum would stay at 256
    assert found.arrays["weight"].dtype == torch.bfloat16
