"""Whole jobs whose loss holds torch's own modules, and what comes back of their buffers."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence
from torch.nn import functional

from gradbox import Gradient, ModelCallFailed, UntraceableLoss
from tests import case_models
from tests.boxes import TestBox
from tests.cases import CASES
from tests.oracle import TOLERANCE, difference

WAIT_S = 120.0


class BarlowTwins(nn.Module):
    """Zbontar et al. 2021: a batch-normalised projector, two views, one cross-correlation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projector = nn.Sequential(
            nn.Linear(width, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)
        )
        self.last = nn.BatchNorm1d(4, affine=False)

    def forward(self, z: Tensor, noise: Tensor) -> Tensor:
        left, right = self.last(self.projector(z)), self.last(self.projector(z + noise))
        correlation = left.T @ right / z.shape[0]
        target = torch.eye(4, dtype=z.dtype, device=z.device)
        return (correlation - target).square().sum()


def test_barlow_twins_trains_through_its_projector_as_local_code_does(box: TestBox) -> None:
    torch.manual_seed(0)
    shards = CASES["mlp"]().groups["z"]
    model = case_models.mlp()
    z = torch.cat([model(shard["0"]) for shard in shards])
    noise = torch.randn(z.shape, dtype=z.dtype)
    loss = BarlowTwins(z.shape[1]).double()
    local = copy.deepcopy(loss)
    local(z, noise).backward()
    gradient = Gradient(
        model="mlp",
        inputs=shards,
        loss=loss,
        loss_inputs={"noise": noise},
        returns=("grads", "buffers"),
    )
    result = box.result_of(gradient)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    expected |= {f"loss.{name}": p.grad for name, p in local.named_parameters()}
    assert difference(result.grads, expected) <= TOLERANCE
    assert loss.last.num_batches_tracked == 0
    loss.load_state_dict({**result.loss_buffers}, strict=False)
    for name, buffer in local.named_buffers():
        torch.testing.assert_close(loss.get_buffer(name), buffer, rtol=TOLERANCE, atol=TOLERANCE)


def test_buffers_of_the_loss_come_only_when_asked_for(twin: TestBox) -> None:
    shards = CASES["mlp"]().groups["z"]
    loss = BarlowTwins(3).double()
    noise = torch.zeros(14, 3, dtype=torch.float64)
    gradient = Gradient(
        model="mlp", inputs=shards, loss=loss, loss_inputs={"noise": noise}, wrt="4.bias"
    )
    assert not twin.result_of(gradient).loss_buffers


def test_a_module_that_is_the_loss_is_refused_at_the_users_own_line(twin: TestBox) -> None:
    shards = CASES["mlp"]().groups["z"]
    with twin.client() as client, pytest.raises(UntraceableLoss) as refused:
        client.submit(Gradient(model="mlp", inputs=shards, loss=nn.Dropout()))
    assert str(refused.value).startswith(__file__)
    assert "call .eval() on it" in str(refused.value)


class Likelihood(nn.Module):
    """A Gaussian with a learned scale, of torch's own distributions; it checks its arguments."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(width, dtype=torch.float64))

    def forward(self, z: Tensor, target: Tensor) -> Tensor:
        if z.shape != target.shape:
            raise ValueError(f"expected a target for each output, got {target.shape}")
        scale = functional.softplus(self.raw)
        outputs = Independent(Normal(z, scale), 1)
        prior = Independent(Normal(torch.zeros_like(z), torch.ones_like(z)), 1)
        return kl_divergence(outputs, prior).mean() - outputs.log_prob(target).mean()


def test_a_loss_of_distributions_is_exact_and_its_checks_are_made_on_the_box(box: TestBox) -> None:
    shards = CASES["mlp"]().groups["z"]
    model = case_models.mlp()
    z = torch.cat([model(shard["0"]) for shard in shards])
    target, loss = torch.ones_like(z).detach(), Likelihood(z.shape[1])
    local = copy.deepcopy(loss)
    local(z, target).backward()
    asked = Gradient(model="mlp", inputs=shards, loss=loss, loss_inputs={"target": target})
    with box.client() as client:
        result = client.submit(asked).result(WAIT_S)
        wrong = replace(asked, loss_inputs={"target": target[:, :1]})
        with pytest.raises(
            ModelCallFailed, match=r"does not hold \(test_loss_modules\.py:\d+: if z\.shape"
        ):
            client.submit(wrong).result(WAIT_S)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert difference(result.grads, expected | {"loss.raw": local.raw.grad}) <= TOLERANCE


def test_fp64_widens_what_functions_hold(twin: TestBox) -> None:
    torch.manual_seed(0)
    shards = CASES["mlp"]().groups["z"]
    projector = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    projector[0].requires_grad_(False)
    shift, scale = torch.randn(3), torch.randn(2)

    def loss(module: nn.Module, z: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return (module(z + shift) * scale).square().sum()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projector = copy.deepcopy(projector)

        def forward(self, z: Tensor) -> Tensor:
            return loss(self.projector, z, shift, scale)

    result = twin.result_of(Gradient(model="mlp", inputs=shards, loss=Loss(), precision="fp64"))
    model, local = case_models.mlp(), copy.deepcopy(projector).double()
    z = torch.cat([model(shard["0"]) for shard in shards])
    loss(local, z, shift.double(), scale.double()).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert difference({n: result.grads[n] for n in expected}, expected) <= TOLERANCE
    assert (
        difference(
            {"weight": result.grads["loss.projector.2.weight"].double()},
            {"weight": local[2].weight.grad},
        )
        <= 1e-6
    )
