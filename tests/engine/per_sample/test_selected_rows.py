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
