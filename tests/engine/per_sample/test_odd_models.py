"""Models that a trial run, a hook or a vectorised backward pass does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.errors import BadInputs
from gradbox_engine.per_sample import jacobian
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written


class Watchful(torch.autograd.Function):
    """2 x, whose backward pass looks at a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g if g.abs().max().item() > 1e30 else g * 2


def _apart(model: nn.Module, inputs: dict[str, Tensor]) -> float:
    expected = naive.flat(naive.jacobian(model, inputs))
    return naive.difference(naive.flat(jacobian(model, [inputs]).arrays), expected)


def _x() -> dict[str, Tensor]:
    return {"0": torch.randn(6, 5, dtype=torch.float64)}


@pytest.mark.parametrize("reduce", ["none", "norm", "gram", "vjp"])
def test_rows_by_parameters_that_z_does_not_depend_on_are_zeros(reduce: Any) -> None:
    model = Written(lambda m, x: m.a(x), a=nn.Linear(5, 3), unused=nn.Linear(2, 2)).double()
    vectors = torch.ones(6, 3, dtype=torch.float64) if reduce == "vjp" else None
    found = jacobian(model, [_x()], wrt=["unused.*"], reduce=reduce, vectors=vectors)
    assert found.arrays
    assert not any(array.any() for array in found.arrays.values())


def test_a_parameter_without_entries_has_rows_without_entries() -> None:
    model = Written(
        lambda m, x: m.a(torch.cat([m.tokens.expand(len(x), -1, -1), x[:, None]], 1)).sum(1),
        a=nn.Linear(5, 3),
        tokens=nn.Parameter(torch.empty(1, 0, 5)),  # a model's number of register tokens may be 0
    ).double()
    found = jacobian(model, [_x()])
    assert found.arrays["tokens"].shape == (6, 3, 1, 0, 5)
    assert _apart(model, _x()) <= naive.TOLERANCE


def test_a_complex_parameter_is_refused_by_name() -> None:
    model = Written(
        lambda m, x: torch.fft.irfft(torch.fft.rfft(m.a(x)) * m.w, n=5),
        a=nn.Linear(5, 5),
        w=nn.Parameter(torch.randn(3, dtype=torch.cfloat)),
    )
    inputs = {"0": torch.randn(6, 5)}
    with pytest.raises(BadInputs, match=r"\['w'\].*view_as_real"):
        jacobian(model, [inputs])
    assert jacobian(model, [inputs], wrt=["a.*"]).arrays["a.bias"].shape == (6, 5, 5)


@pytest.mark.parametrize("reduce", ["none", "norm", "gram"])
def test_a_model_without_parameters_is_refused(reduce: Any) -> None:
    with pytest.raises(BadInputs, match="expected a model with floating-point parameters"):
        jacobian(nn.Tanh(), [_x()], reduce=reduce)


class OneExpertAShard(nn.Module):
    """Returns one of two experts' outputs; the second's backward pass does not vectorise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.one, self.other = (nn.Linear(5, 3, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.one(x), Watchful.apply(self.other(x))
        return one if x[0, 0] > 0 else other


@pytest.mark.parametrize("wrt", ["one", "other"])
def test_shards_that_reach_none_of_the_parameters_have_rows_of_zeros(wrt: str) -> None:
    shards = [{"0": torch.full((2, 5), x, dtype=torch.float64)} for x in (1.0, -1.0, 2.0, -2.0)]
    model = OneExpertAShard()
    each = [naive.jacobian(model, shard) for shard in shards]
    expected = {
        name: torch.cat([rows[name] for rows in each]) for name in each[0] if name.startswith(wrt)
    }
    found = jacobian(model, shards, wrt=[wrt])
    assert naive.difference(naive.flat(found.arrays), naive.flat(expected)) <= naive.TOLERANCE
    assert found.unreached == ()
    assert naive.flat(found.arrays).any(2).sum() == 4 * 3
    unreached = jacobian(model, shards[wrt == "one" :: 2], wrt=[wrt])
    assert unreached.unreached == (f"{wrt}.weight", f"{wrt}.bias")
    assert not naive.flat(unreached.arrays).any()


@pytest.mark.parametrize("wrt", [["inputs.0"], ["0.*", "inputs.*"]])
def test_rows_by_inputs_are_refused(wrt: list[str]) -> None:
    model = nn.Sequential(nn.Linear(5, 3, dtype=torch.float64))
    with pytest.raises(BadInputs, match="wrt: expected names of parameters"):
        jacobian(model, [_x()], wrt=wrt)
