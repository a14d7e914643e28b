"""Layers that see some samples or tokens only, or see the samples in another order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import (
    NoBatchAxis,
    SampleResult,
    jacobian,
    per_sample_gradient,
    shard_run,
)
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written


def _squares(z: Tensor) -> Tensor:
    return z.square().sum(1)


def _difference(model: nn.Module, inputs: dict[str, Tensor], result: SampleResult) -> float:
    losses = _squares(naive.outputs(model, inputs))[:, None]
    expected = naive.flat(naive.rows(losses, dict(model.named_parameters())))[:, 0]
    return naive.difference(naive.flat(result.arrays, lead=1), expected)


def _of_tokens(m: nn.Module, x: Tensor, keep: Tensor) -> Tensor:
    h = x.new_zeros(*keep.shape, 4)
    h[keep] = m.a(x[keep]).tanh()  # type: ignore[operator]
    return m.b(h.sum(1))  # type: ignore[operator,no-any-return]


@pytest.mark.parametrize("unchecked", [[], ["self"]])
def test_a_layer_that_leaves_tokens_out_in_a_later_job(unchecked: list[str]) -> None:
    torch.manual_seed(0)
    model = Written(_of_tokens, a=nn.Linear(5, 4), b=nn.Linear(4, 3)).double()
    x, keep = torch.randn(6, 4, 5, dtype=torch.float64), torch.ones(6, 4, dtype=torch.bool)
    for left_out in ([], [(1, 3)], [(1, 2), (1, 3), (4, 2), (4, 3)], [(b, 3) for b in range(6)]):
        kept = keep.clone()
        for place in left_out:
            kept[place] = False
        inputs = {"x": x, "keep": kept}
        result = per_sample_gradient(model, [inputs], _squares, unchecked=unchecked)
        assert _difference(model, inputs, result) <= naive.TOLERANCE


def _routed(m: nn.Module, x: Tensor) -> Tensor:
    first = x[:, 0] > 0
    z = x.new_zeros(x.shape[0], 3)
    z[first] = m.a(x[first])  # type: ignore[operator]
    z[~first] = m.b(x[~first])  # type: ignore[operator]
    return z


def test_hard_routing_of_samples() -> None:
    torch.manual_seed(0)
    model = Written(_routed, a=nn.Linear(5, 3), b=nn.Linear(5, 3)).double()
    mixed = torch.randn(12, 5, dtype=torch.float64)
    alike = mixed.clone()
    alike[:, 0] = alike[:, 0].abs() + 0.1
    for x in (alike, mixed, -alike):
        result = per_sample_gradient(model, [{"0": x}], _squares)
        assert _difference(model, {"0": x}, result) <= naive.TOLERANCE


@pytest.mark.parametrize("samples", [5, 6])
def test_samples_in_reverse_inside(samples: int) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.b(m.a(x.flip(0)).tanh()).flip(0)  # type: ignore[operator,no-any-return]

    torch.manual_seed(0)
    model = Written(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3)).double()
    inputs = {"0": torch.randn(samples, 5, dtype=torch.float64)}
    result = per_sample_gradient(model, [inputs], _squares)
    assert _difference(model, inputs, result) <= naive.TOLERANCE


def _by_index(h: Tensor, back: Tensor) -> Tensor:
    return h[back]


def _by_select(h: Tensor, back: Tensor) -> Tensor:
    return h.index_select(0, back)


def _by_gather(h: Tensor, back: Tensor) -> Tensor:
    return torch.gather(h, 0, back[:, None].expand_as(h))


def _by_writing(h: Tensor, back: Tensor) -> Tensor:
    z = torch.empty_like(h)
    z[back.argsort()] = h
    return z


@pytest.mark.parametrize("undo", [_by_index, _by_select, _by_gather, _by_writing])
def test_samples_sorted_by_length_inside(undo: object) -> None:
    assert callable(undo)

    def forward(m: nn.Module, x: Tensor, n: Tensor) -> Tensor:
        order = torch.argsort(n, descending=True, stable=True)
        h = m.b(m.a(x[order]).tanh())  # type: ignore[operator]
        found: Tensor = undo(h, torch.argsort(order))
        return found

    torch.manual_seed(0)
    model = Written(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3)).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    for lengths in ([5] * 6, [1, 5, 4, 3, 9, 2], [1, 5, 3, 2, 9, 4]):
        inputs = {"x": x, "n": torch.tensor(lengths)}
        result = per_sample_gradient(model, [inputs], _squares)
        assert _difference(model, inputs, result) <= naive.TOLERANCE


def test_the_last_token_of_each_sample_is_compared_on_the_first_shard_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(m: nn.Module, x: Tensor, n: Tensor) -> Tensor:
        return m.b(x)[torch.arange(len(x)), n]  # type: ignore[operator,no-any-return]

    torch.manual_seed(0)
    model = Written(forward, b=nn.Linear(4, 3)).double()
    inputs = {"x": torch.randn(6, 5, 4, dtype=torch.float64), "n": torch.arange(6) % 5}
    compared = _comparisons(monkeypatch)
    result = per_sample_gradient(model, [inputs] * 3, _squares)
    assert len(compared) == 1
    rows = {name: array[:6] for name, array in result.arrays.items()}
    assert _difference(model, inputs, replace(result, arrays=rows)) <= naive.TOLERANCE
    assert not result.loops


def test_samples_sorted_by_length_are_compared_on_every_shard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(m: nn.Module, x: Tensor, n: Tensor) -> Tensor:
        order = torch.argsort(n)
        return m.a(x[order])[torch.argsort(order)]  # type: ignore[operator,no-any-return]

    model = Written(forward, a=nn.Linear(5, 3)).double()
    inputs = {"x": torch.randn(6, 5, dtype=torch.float64), "n": torch.arange(6)}
    compared = _comparisons(monkeypatch)
    per_sample_gradient(model, [inputs] * 3, _squares)
    assert len(compared) >= 3


def _comparisons(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that grows with each comparison."""
    compared: list[None] = []
    compare = shard_run.compare

    def counted(*args: Any, **kwargs: Any) -> Any:
        compared.append(None)
        return compare(*args, **kwargs)

    monkeypatch.setattr(shard_run, "compare", counted)
    return compared


def test_an_output_that_loses_its_only_sample_is_refused() -> None:
    model = Written(lambda m, x: m.a(x).squeeze(), a=nn.Linear(5, 3))
    with pytest.raises(NoBatchAxis, match=r"expected 1 rows"):
        jacobian(model, [{"0": torch.randn(1, 5)}])


def test_a_token_given_once_for_each_sample() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        tokens = torch.cat([m.c] * x.shape[0])
        return m.a(torch.cat([tokens, x[:, None]], 1)).tanh().sum(1)  # type: ignore[operator,no-any-return]

    torch.manual_seed(0)
    model = Written(forward, a=nn.Linear(5, 3), c=nn.Parameter(torch.randn(1, 1, 5))).double()
    inputs = {"0": torch.randn(6, 5, dtype=torch.float64)}
    result = per_sample_gradient(model, [inputs], _squares)
    assert _difference(model, inputs, result) <= naive.TOLERANCE
    assert set(result.loops) == {"c"}
