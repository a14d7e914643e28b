"""`torch.cdist` in a frozen model: forward mode where torch has neither it nor double backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from gradbox_engine import Group, Objective, mixed_gradient
from gradbox_engine.mixed import forward_rules
from gradbox_engine.mixed.forward_rules import LeanRules
from tests.device import DEVICE, moved
from tests.mixed_cases import TOLERANCE
from tests.oracle import difference


def _written_out(a: Tensor, b: Tensor) -> Tensor:
    return (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1).sqrt()


def _cdist(a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a, b)


class _Kernel(nn.Module):
    """Distances from centres and between samples' parts."""

    def __init__(self, distances: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.centres = nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
        self.distances = distances

    def forward(self, x: Tensor) -> Tensor:
        near: Tensor = torch.exp(-self.distances(x, self.centres))
        return near @ self.distances(self.centres, x[:1]).square()


def _found(distances: Any) -> Any:
    y = torch.linspace(-1, 1, 1, dtype=torch.float64, device=DEVICE).add(2).requires_grad_()
    generator = torch.Generator().manual_seed(1)
    shards = [
        moved({"0": torch.randn(n, 4, dtype=torch.float64, generator=generator)}) for n in (3, 2)
    ]
    inner = Objective(lambda y, v: (v @ y).pow(3).sum(), {"y": y}, {"y": y})
    outer = Objective(lambda dfdz: dfdz.pow(3).sum())
    return mixed_gradient(_Kernel(distances).to(DEVICE), Group("z", shards), inner, outer)


def test_a_mixed_gradient_is_that_of_distances_written_out() -> None:
    found, expected = _found(_cdist), _found(_written_out)
    assert found.fallbacks == {}
    assert difference(found.grads, expected.grads) <= TOLERANCE


@pytest.mark.parametrize("budget", [0, 2**20])
@pytest.mark.parametrize("both", [False, True])
def test_the_tangent_is_that_of_distances_written_out(
    budget: int, both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_rules, "_DIFFERENCES_BYTES", budget)
    torch.manual_seed(0)
    a, b = torch.randn(2, 6, 4, dtype=torch.float64), torch.randn(30, 4, dtype=torch.float64)
    tangents = []
    for distances in (_cdist, _written_out):
        with forward_ad.dual_level(), LeanRules():
            left = forward_ad.make_dual(a, a.sin())
            right = forward_ad.make_dual(b, b.cos()) if both else b
            tangents.append(forward_ad.unpack_dual(distances(left, right)).tangent)
    assert tangents[0] is not None
    assert torch.allclose(*tangents, rtol=1e-10)


def test_points_that_are_one_have_a_tangent_of_zero() -> None:
    a = torch.ones(2, 3, dtype=torch.float64)
    with forward_ad.dual_level(), LeanRules():
        found = torch.cdist(forward_ad.make_dual(a, a), torch.ones(4, 3, dtype=torch.float64))
        assert forward_ad.unpack_dual(found).tangent.eq(0).all()
