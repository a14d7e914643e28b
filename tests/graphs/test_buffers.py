"""What a loss puts in place of its buffers comes back, as what it writes into them does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradbox.tracing.trace import trace
from gradbox_worker.interpreting.build import build

D = 3


class Keeping(nn.Module):
    """A loss with running state; `step` is what the cases differ in."""

    mean: Tensor
    spread: Tensor
    keys: Tensor

    def __init__(self, step: Callable[[Keeping, Tensor], Tensor]) -> None:
        super().__init__()
        self.step = step
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.register_buffer("mean", torch.linspace(1, 2, D, dtype=torch.float64))
        self.register_buffer("spread", torch.linspace(3, 5, D, dtype=torch.float64))
        self.register_buffer("keys", torch.arange(4.0 * D, dtype=torch.float64).reshape(4, D))

    def forward(self, z: Tensor) -> Tensor:
        return self.step(self, z * self.scale)


def average(loss: Keeping, z: Tensor) -> Tensor:
    value = (z * loss.mean).square().sum()  # autograd keeps the mean as it was
    loss.mean = 0.9 * loss.mean + 0.1 * z.detach().mean(0)
    return value + (z * loss.mean).sum()


def exchanged(loss: Keeping, z: Tensor) -> Tensor:
    loss.mean, loss.spread = loss.spread, loss.mean
    return (z * loss.mean / loss.spread).sum()


def queue(loss: Keeping, z: Tensor) -> Tensor:
    value = (z @ loss.keys.T).logsumexp(1).sum()
    loss.keys = torch.cat([z.detach(), loss.keys])[:4]
    return value


def written_and_replaced(loss: Keeping, z: Tensor) -> Tensor:
    loss.mean.mul_(0.5)
    value = (z * loss.mean).square().sum()
    loss.mean = loss.mean + 1
    loss.mean += z.detach().mean(0)
    return value * loss.mean.sum()


def view_of_another(loss: Keeping, z: Tensor) -> Tensor:
    loss.mean = loss.keys[0]
    loss.keys.add_(1)
    return (z * loss.mean).sum()


@pytest.mark.parametrize("step", [average, exchanged, queue, written_and_replaced, view_of_another])
def test_a_buffer_that_is_replaced_comes_back(step: Callable[[Keeping, Tensor], Tensor]) -> None:
    loss = Keeping(step)
    traced = trace(loss, positional=1)
    again = build(traced.graph, traced.tensors, device="cpu", buffers=[*traced.buffers])
    for num in (2, 5):
        z = torch.linspace(-1, 1, num * D, dtype=torch.float64).reshape(num, D).requires_grad_()
        local = Keeping(step)
        expected, got = local(z), again(z)
        found = (got, *torch.autograd.grad(got, [z, loss.scale]))
        right = (expected, *torch.autograd.grad(expected, [z, local.scale]))
        assert all(torch.equal(*pair) for pair in zip(found, right, strict=True))
        for name, buffer in again.buffers.items():
            assert torch.equal(buffer, local.get_buffer(name))
    assert torch.equal(loss.mean, torch.linspace(1, 2, D, dtype=torch.float64))


def test_a_buffer_that_would_grow_is_refused_by_its_name() -> None:
    def step(loss: Keeping, z: Tensor) -> Tensor:
        loss.keys = torch.cat([loss.keys, z.detach()])
        return z.sum()

    traced = trace(Keeping(step), positional=1)
    with pytest.raises(AssertionError, match=r"buffer keys another size than \(4, 3\)"):
        build(traced.graph, traced.tensors, device="cpu")(torch.ones(1, D, dtype=torch.float64))
