"""Rows whose samples data decide: experts that see the tokens sent to them."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradbox_engine.per_sample import jacobian
from gradbox_engine.per_sample.recording.row_owners import row_owners
from tests.device import DEVICE, moved
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written

T, D, EXPERTS = 3, 4, 6


def _hit(m: Any, tokens: Tensor) -> Tensor:
    """Only experts that a token is sent to are called."""
    expert = m.gate(tokens).argmax(1)
    h = torch.zeros_like(tokens)
    for number in expert.unique():
        rows = torch.where(expert == number)[0]
        h.index_add_(0, rows, F.linear(tokens[rows], m.w[number], m.b[number]).tanh())
    return h


def _grouped(m: Any, tokens: Tensor) -> Tensor:
    """One grouped product of sorted tokens; no expert sees those behind the last offset."""
    expert, order = m.gate(tokens).argmax(1).sort(stable=True)
    ends = torch.arange(EXPERTS - 1, device=tokens.device)
    offs = torch.searchsorted(expert, ends, right=True).to(torch.int32)
    h = torch._grouped_mm(tokens[order], m.w[:-1], offs=offs)
    seen = (torch.arange(len(tokens), device=tokens.device) < offs[-1])[:, None]
    h = torch.where(seen, h + m.b[expert], 0.0).tanh()
    z = torch.zeros_like(h)
    z[order] = h
    return z


def _unfused(m: Any, tokens: Tensor) -> Tensor:
    """The same without the kernel, which takes no float64."""
    expert = m.gate(tokens).argmax(1)
    h = torch.bmm(tokens[:, None], m.w[expert])[:, 0] + m.b[expert]
    return torch.where((expert < EXPERTS - 1)[:, None], h, 0.0).tanh()


def _mixture(experts: Any) -> nn.Module:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        tokens = m.first(x).reshape(-1, D).tanh()
        return m.last((tokens + experts(m, tokens)).view(len(x), -1))

    model = Written(
        forward,
        first=nn.Linear(D, D),
        gate=nn.Linear(D, EXPERTS, bias=False),
        w=nn.Parameter(torch.randn(EXPERTS, D, D)),
        b=nn.Parameter(torch.randn(EXPERTS, D)),
        last=nn.Linear(T * D, 2),
    )
    return model.double().to(DEVICE)


def _inputs(samples: int) -> dict[str, Tensor]:
    return moved({"0": torch.randn(samples, T, D, dtype=torch.float64)})


def test_experts_that_are_called_only_where_a_token_is_sent_to_them() -> None:
    model = _mixture(_hit)
    for samples in (2, 5, 40, 5):  # some experts are not hit, and not the same ones
        inputs = _inputs(samples)
        expected = naive.flat(naive.jacobian(model, inputs))
        result = jacobian(model, [inputs])
        assert naive.difference(naive.flat(result.arrays), expected) <= naive.TOLERANCE
        assert not result.loops
    assert result.roads["w"] == ("derived", "linear by owner")


def test_shards_that_hit_other_experts_each() -> None:
    model = _mixture(_hit)
    shards = [_inputs(3) for _ in range(4)]
    result = jacobian(model, shards)
    expected = torch.cat([naive.flat(naive.jacobian(model, shard)) for shard in shards])
    assert naive.difference(naive.flat(result.arrays), expected) <= naive.TOLERANCE
    assert not result.loops


def test_a_grouped_product_and_a_table_of_biases_by_sorted_expert() -> None:
    model = _mixture(_grouped)
    inputs = _inputs(7)
    result = jacobian(model, [inputs])
    expected = naive.flat(naive.jacobian(_mixture(_unfused), inputs))
    assert naive.difference(naive.flat(result.arrays), expected) <= naive.TOLERANCE
    assert not result.loops
    assert result.roads["b"] == ("index by owner",)


@pytest.mark.parametrize(("dtype", "samples"), [(torch.float64, 70), (torch.float16, 9)])
def test_every_row_is_given_to_its_sample(dtype: torch.dtype, samples: int) -> None:
    owner = torch.randperm(3 * samples, generator=torch.Generator().manual_seed(0)) % samples
    g = torch.rand(len(owner), 2).add(0.5).to(dtype)
    g[::4] = 0
    (found,) = row_owners(
        [g], lambda weights: [g * weights[owner][:, None].to(dtype)], torch.zeros(samples).bool()
    )
    assert found is not None
    led = found.lead(torch.arange(len(owner)) + 1)
    for sample, rows in enumerate(led):
        mine = (owner == sample) & (g != 0).all(1)
        assert rows[rows > 0].tolist() == (mine.nonzero()[:, 0] + 1).tolist()


def test_no_row_has_a_gradient() -> None:
    none = torch.zeros(5, 2)
    nobody = torch.zeros(3).bool()
    assert row_owners([none, none[:0]], lambda _: [none, none[:0]], nobody) == [None, None]


@pytest.mark.parametrize("suspects", [[2], [0, 2], []])
def test_a_row_without_a_finite_gradient_goes_to_the_samples_that_are_not_finite(
    suspects: list[int],
) -> None:
    g = torch.tensor([[1.0, 2], [nan, 3], [4, 0], [nan, inf], [5, inf], [0, 0]])
    owner = torch.tensor([0, 2, 1, 2, 2, 1])
    bad = torch.tensor([sample in suspects for sample in range(3)])
    (found,) = row_owners([g], lambda weights: [g * weights[owner][:, None]], bad)
    assert found is not None
    for sample, rows in enumerate(found.rows):
        own = [row for row in (0, 1, 2, 4) if owner[row] == sample]
        lost = [3] if sample in (suspects or range(3)) else []
        assert rows[found.real[sample]].tolist() == own + lost
