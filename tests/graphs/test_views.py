"""Views and second names in a graph are those of the function: gradients and writes reach them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradbox.errors import UntraceableLoss
from gradbox.tracing.trace import trace
from gradbox_worker.interpreting.build import build

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "T": lambda z: z.T,
    "mT": lambda z: z.mT,
    "H": lambda z: z.H,
    "mH": lambda z: z.mH,
    "real": lambda z: z.real,
    "imag": lambda z: z.imag,
    "T.T": lambda z: z.T.T,
}


def agrees(function: Callable[[Tensor], Tensor], z: Tensor) -> bool:
    """Tell whether a function and its graph have the same value and gradient."""
    traced = trace(function, positional=1)
    found = []
    for one in (function, build(traced.graph, traced.tensors, device="cpu")):
        leaf = z.clone().requires_grad_()
        value = one(leaf * 1)
        found.append((value.detach(), *torch.autograd.grad(value, leaf)))
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_a_gradient_where_it_was_taken_with_one(view: str) -> None:
    def taken_before(z: Tensor) -> Tensor:
        taken = VIEWS[view](z * (1 + 2j))
        with torch.no_grad():
            length = taken.abs().sum()
        return (taken.abs().square() / length).sum()

    def taken_inside(z: Tensor) -> Tensor:
        weighted = z * (1 + 2j)
        with torch.no_grad():
            taken = VIEWS[view](weighted)
        return (taken.abs() * weighted.abs().sum()).sum()

    z = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3)
    assert agrees(taken_before, z)
    assert agrees(taken_inside, z)


def test_a_shift_in_place_is_seen_through_another_name() -> None:
    def shifted(z: Tensor) -> Tensor:
        places = z.argsort(1)
        left, right = places[0], places[1]
        left <<= 2
        right >>= 1
        return (z * places).sum()

    assert agrees(shifted, torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]]))


def written_base(base: Tensor, view: Tensor) -> Callable[[Tensor], Tensor]:
    def loss(z: Tensor) -> Tensor:
        with torch.no_grad():
            base.copy_(z)
        return (z[0] * view).sum()

    return loss


def written_view(base: Tensor, view: Tensor) -> Callable[[Tensor], Tensor]:
    def loss(z: Tensor) -> Tensor:
        view[1:] += z[0, 1:].detach()
        return (z * base).sum()

    return loss


@pytest.mark.parametrize("loss", [written_base, written_view])
def test_a_write_that_another_closure_tensor_would_show_is_refused(
    loss: Callable[[Tensor, Tensor], Callable[[Tensor], Tensor]],
) -> None:
    base = torch.zeros(2, 3)
    with pytest.raises(UntraceableLoss, match=r"\(2, 3\).*share memory"):
        trace(loss(base, base[1]), positional=1)
    trace(loss(base, base[1].clone()), positional=1)


def test_tensors_that_share_memory_may_be_read_beside_a_write_elsewhere() -> None:
    base = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    view = base.T

    def loss(z: Tensor) -> Tensor:
        product = z @ view
        product += 1
        return (product @ base).sum()

    assert agrees(loss, torch.ones(2, 3, dtype=torch.float64))
