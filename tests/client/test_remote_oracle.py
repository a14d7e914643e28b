"""Losses that nobody can trace, through a remote model: the gradients are those of naive code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import shard_stream
from tests import case_models
from tests.boxes import TestBox
from tests.cases import CASES
from tests.client.remote import NaiveModel, local_outputs, loss_of, remote_outputs
from tests.device import DEVICE, same_bits
from tests.oracle import TOLERANCE, difference


def shards_of(*sizes: int, features: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, features, generator=generator, dtype=torch.float64) for n in sizes]


def branching(z: Tensor) -> Tensor:
    """Takes another path, and another number of steps, by what z holds."""
    total = z.new_zeros(())
    for row in z:
        while row.norm() > 0.5:
            row = row * 0.7
        total = total + (row.exp().sum() if row[0].item() > 0 else row.square().sum())
    return total


class ByNumpy(torch.autograd.Function):
    """Σ z³ whose value and derivative NumPy computes."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        array = z.detach().numpy()
        ctx.gradient = 3 * array**2
        return torch.tensor(np.power(array, 3).sum())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.from_numpy(ctx.gradient)


def by_numpy(z: Tensor) -> Tensor:
    order = np.argsort(np.asarray(z.detach()).sum(1))
    return ByNumpy.apply(z[torch.from_numpy(order[: len(order) // 2])])


def assigned(z: Tensor) -> Tensor:
    """Hungarian matching of the samples to a fixed set (Carion et al. 2020, eq. 1)."""
    optimize = pytest.importorskip("scipy.optimize")
    targets = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).reshape(z.shape).flip(0)
    cost = torch.cdist(z, targets)
    rows, columns = optimize.linear_sum_assignment(cost.detach().numpy())
    return cost[rows, columns].square().sum()


UNTRACEABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "data-dependent control flow": branching,
    "numpy": by_numpy,
    "scipy": assigned,
}


@pytest.mark.parametrize("name", UNTRACEABLE)
@pytest.mark.parametrize("model", ["inplace_mlp", "average_in_place"])
def test_an_untraceable_loss(box: TestBox, model: str, name: str) -> None:
    shards = shards_of(4, 4, 3)
    naive = NaiveModel(getattr(case_models, model)(), mode="train", seed=5)
    expected = UNTRACEABLE[name](torch.cat([naive(x) for x in shards]))
    expected.backward()
    with box.client() as client:
        f = client.model(model, mode="train", seed=5)
        loss = UNTRACEABLE[name](torch.cat([f(x) for x in shards]))
        loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    assert difference(f.grads, naive.grads) <= TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_every_case_of_the_problem_table(twin: TestBox, name: str) -> None:
    case = CASES[name]()
    naive = NaiveModel(case.model(), mode=case.mode, seed=case.seed)
    loss_of(case, local_outputs(case, naive)).backward()
    with twin.client() as client:
        f = client.model(
            case.model.__name__,
            mode=case.mode,
            seed=case.seed,
            output=case.output,
            readout=case.readout,
            wrt=case.wrt,
        )
        loss_of(case, remote_outputs(case, f)).backward()
    wanted = {n: g for n, g in naive.grads.items() if case.wrt is None or n in f.grads}
    assert difference(f.grads, wanted) <= TOLERANCE
    for buffer, value in naive.module.named_buffers():
        torch.testing.assert_close(f.buffers[buffer], value.cpu(), rtol=TOLERANCE, atol=TOLERANCE)


def test_two_models_at_once_one_of_them_local(box: TestBox) -> None:
    shards = shards_of(4, 3)

    def head() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double()

    def loss(stem: nn.Module, f: Any, g: nn.Module) -> Tensor:
        return branching(torch.cat([f(stem(x)) * g(x) for x in shards]))

    naive, stem, other = NaiveModel(case_models.mlp()), head(), case_models.mlp()
    loss(stem, naive, other).backward()
    with box.client() as client:
        f, remote_stem, remote_other = client.model("mlp"), head(), case_models.mlp()
        loss(remote_stem, f, remote_other).backward()
    assert difference(f.grads, naive.grads) <= TOLERANCE
    for mine, theirs in [(remote_stem, stem), (remote_other, other)]:
        found = {n: p.grad for n, p in mine.named_parameters() if p.grad is not None}
        assert difference(found, {n: p.grad for n, p in theirs.named_parameters()}) <= TOLERANCE


def test_two_remote_models_at_once(twin: TestBox) -> None:
    shards = shards_of(3, 3)
    teacher, student = NaiveModel(case_models.mlp()), NaiveModel(case_models.inplace_mlp())
    sum((teacher(x) - student(x)).square().sum() for x in shards).backward()
    with twin.client() as client:
        f, g = client.model("mlp"), client.model("inplace_mlp")
        sum((f(x) - g(x)).square().sum() for x in shards).backward()
    assert difference(f.grads, teacher.grads) <= TOLERANCE
    assert difference(g.grads, student.grads) <= TOLERANCE


def test_streams_count_calls_over_the_life_of_the_object(twin: TestBox) -> None:
    shards = shards_of(2, 2, 2)
    with twin.client() as client:
        f = client.model("inplace_mlp", mode="train", seed=9)
        first = f(shards[0]).detach()  # a job of its own
        others = [z.detach() for z in [f(shards[1]), f(shards[2])]]
    for index, z in enumerate([first, *others]):
        with shard_stream(9, group=0, shard=index):
            expected = case_models.inplace_mlp().to(DEVICE).train()(shards[index].to(DEVICE))
        assert same_bits(z.to(DEVICE), expected.detach())
