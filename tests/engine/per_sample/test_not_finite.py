"""A sample that is NaN or infinite: so are its row and what is made of it, and no other row is.

Not so inside a model whose parameters take one backward pass a sample, each through all samples.
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import jacobian, per_sample_gradient
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written

B, T, BAD = 6, 4, 2
Case = tuple[nn.Module, dict[str, Tensor]]


def _normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0)).double()


def _experts(activation: Callable[[Tensor], Tensor] = torch.tanh) -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        h = torch.zeros_like(tokens)
        expert = tokens[:, :3].argmax(1)
        for number in range(3):
            rows = torch.where(expert == number)[0]
            h.index_add_(0, rows, activation(nn.functional.linear(tokens[rows], m.w[number])))
        z: Tensor = m.last(h.view(len(x), -1))
        return z

    w = nn.Parameter(torch.randn(3, 4, 4))
    return Written(forward, w=w, last=nn.Linear(T * 4, 2)), {"x": _normal(B, T, 4)}


def _masked_attention() -> Case:
    def forward(m: Any, x: Tensor, padded: Tensor) -> Tensor:
        z: Tensor = m.last(m.att(x, x, x, key_padding_mask=padded)[0].mean(1))
        return z

    att = nn.MultiheadAttention(4, 2, batch_first=True)
    padded = torch.zeros(B, T, dtype=torch.bool)
    padded[0, 3] = True
    return Written(forward, att=att, last=nn.Linear(4, 2)), {
        "x": _normal(B, T, 4),
        "padded": padded,
    }


def _group_norm() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        z: Tensor = m.last(m.norm(m.a(x).flatten(0, 1)).view(len(x), -1))
        return z

    parts = {"a": nn.Linear(4, 4), "norm": nn.GroupNorm(2, 4), "last": nn.Linear(T * 4, 2)}
    return Written(forward, **parts), {"x": _normal(B, T, 4)}


def _folded_convolution() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x.flatten(0, 1)).tanh().unflatten(0, x.shape[:2])
        z: Tensor = m.last(h.mean((1, 3, 4)))
        return z

    parts = {"a": nn.Conv2d(2, 3, 3), "last": nn.Linear(3, 2)}
    return Written(forward, **parts), {"x": _normal(B, T, 2, 5, 5)}


def _packed() -> Case:
    def forward(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        z: Tensor = m.last(m.a(packed)[1][0][-1])
        return z

    parts = {"a": nn.LSTM(4, 4, batch_first=True), "last": nn.Linear(4, 2)}
    return Written(forward, **parts), {
        "x": _normal(B, T, 4),
        "lengths": torch.tensor([4, 3, 2, 1, 4, 3]),
    }


def _hooked() -> Case:
    a = nn.Linear(4, 4)
    a.weight.register_hook(lambda gradient: gradient * 2)
    return Written(lambda m, x: m.last(m.a(x).tanh().mean(1)), a=a, last=nn.Linear(4, 2)), {
        "x": _normal(B, T, 4)
    }


RULED = [_masked_attention, _group_norm, _folded_convolution]
LOOPED = [_experts, _packed, _hooked]


def _built(case: Callable[[], Case]) -> Case:
    torch.manual_seed(1)
    model, inputs = case()
    return model.double().eval(), inputs


def _nan_input(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    x = inputs["x"].clone()
    x[BAD].view(-1)[0] = nan
    return {**inputs, "x": x}


def _masked_whole(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    padded = inputs["padded"].clone()
    padded[BAD] = True
    return {**inputs, "padded": padded}


def _loss(z: Tensor, target: Tensor) -> Tensor:
    return (z - target).square().sum(1) + z.square().sum(1) * target[:, 0].log()


def _targets(bad: float) -> Tensor:
    target = _normal(B, 2).abs()
    target[BAD] = bad
    return target


def _naive(model: nn.Module, inputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """Return (B, P) by a loop over samples, each called alone."""
    rows = []
    for b in range(B):
        z = model(**{name: x[b : b + 1] for name, x in inputs.items()})
        losses = _loss(z, target[b : b + 1])[:, None]
        rows.append(naive.flat(naive.rows(losses, dict(model.named_parameters())))[:, 0])
    return torch.cat(rows)


@pytest.mark.parametrize("bad", [None, nan, 0.0], ids=["NaN in the model", "NaN loss", "-Inf loss"])
@pytest.mark.parametrize("case", [*RULED, *LOOPED])
def test_rows_are_those_of_a_loop_over_samples(case: Callable[[], Case], bad: float | None) -> None:
    if bad is None and case in LOOPED:
        pytest.skip("one pass of all samples adds 0 × NaN to the rows of each")
    model, inputs = _built(case)
    if bad is None:
        inputs = (_masked_whole if "padded" in inputs else _nan_input)(inputs)
    target = _targets(1.0 if bad is None else bad)
    expected = _naive(model, inputs, target)
    assert expected.isfinite().all(1).tolist() == [b != BAD for b in range(B)]

    def reduced(**how: Any) -> Any:
        return per_sample_gradient(model, [inputs], _loss, loss_inputs={"target": target}, **how)

    for _ in range(2):  # under a new plan and a kept one
        result = reduced()
        assert bool(result.loops) == (case in LOOPED)
        found = naive.flat(result.arrays, lead=1)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    norms = reduced(reduce="norm")
    assert norms.arrays["norm"].isfinite().tolist() == [b != BAD for b in range(B)]
    for name, size in norms.parameter_norms.items():
        assert not size[BAD].isfinite(), name
    gram = reduced(reduce="gram").arrays["gram"].isfinite()
    assert gram.tolist() == [[BAD not in (b, c) for c in range(B)] for b in range(B)]
    projection = reduced(reduce="projection", dim=8).arrays["projection"]
    assert projection.isfinite().all(1).tolist() == [b != BAD for b in range(B)]
    for name, total in reduced(reduce="clipped_sum", clip=1.0).arrays.items():
        assert not total.isfinite().all(), name


@pytest.mark.parametrize("case", RULED)
def test_jacobians_are_those_of_a_loop_over_samples(case: Callable[[], Case]) -> None:
    model, inputs = _built(case)
    inputs = (_masked_whole if "padded" in inputs else _nan_input)(inputs)
    expected = torch.cat(
        [
            naive.flat(naive.jacobian(model, {name: x[b : b + 1] for name, x in inputs.items()}))
            for b in range(B)
        ]
    )
    found = naive.flat(jacobian(model, [inputs]).arrays)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, equal_nan=True)


def test_a_row_that_is_not_finite_though_its_loss_is_gets_no_zeros() -> None:
    """The root of zero has no derivative, inside the model: no loss tells which sample is hit."""
    model, inputs = _built(lambda: _experts(lambda h: h.abs().sqrt()))
    inputs["x"][BAD, 0] = 0
    result = per_sample_gradient(model, [inputs], lambda z: z.square().sum(1))
    assert result.values is not None
    assert result.values.isfinite().all()
    assert result.roads["w"] == ("loop",)
    assert not result.arrays["w"][BAD].isfinite().all()
