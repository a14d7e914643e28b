"""Rows whose samples data decide: experts that see the tokens sent to them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradbox_engine.per_sample import jacobian
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
    """One grouped product of sorted tokens, each of which an expert sees."""
    expert, order = m.gate(tokens).argmax(1).sort(stable=True)
    ends = torch.arange(EXPERTS, device=tokens.device)
    offs = torch.searchsorted(expert, ends, right=True).to(torch.int32)
    h = (torch._grouped_mm(tokens[order], m.w, offs=offs) + m.b[expert]).tanh()
    z = torch.zeros_like(h)
    z[order] = h
    return z


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
        assert result.roads["w"] == ("loop",)
        assert "data decide which samples linear in the model sees" in result.loops["w"]


def test_shards_that_hit_other_experts_each() -> None:
    model = _mixture(_hit)
    shards = [_inputs(3) for _ in range(4)]
    result = jacobian(model, shards)
    expected = torch.cat([naive.flat(naive.jacobian(model, shard)) for shard in shards])
    assert naive.difference(naive.flat(result.arrays), expected) <= naive.TOLERANCE
    assert set(result.loops) == {"w", "b"}


def test_a_grouped_product_and_a_table_of_biases_by_sorted_expert() -> None:
    model = _mixture(_grouped).float()  # the kernel takes no float64
    inputs = {"0": _inputs(7)["0"].float()}
    result = jacobian(model, [inputs])
    expected = naive.flat(naive.jacobian(model, inputs))
    assert naive.difference(naive.flat(result.arrays), expected) <= 1e-5
    assert set(result.loops) == {"w", "b"}
