"""What odd models are refused for, what is compared of them, and rows that are zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.errors import BadInputs, ModelCallFailed, NoBatchAxis
from gradbox_engine.per_sample import jacobian, per_sample_gradient, shard_run
from tests.device import DEVICE
from tests.engine.per_sample import naive
from tests.engine.per_sample.test_ways import built, expected_rows
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


def _squares(z: Tensor) -> Tensor:
    return z.square().sum(1)


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
    losses = _squares(naive.outputs(model, inputs))[:, None]
    expected = naive.flat(naive.rows(losses, dict(model.named_parameters())))[:, 0]
    assert naive.difference(naive.flat(result.arrays, lead=1)[:6], expected) <= naive.TOLERANCE
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


def test_a_bias_needs_no_input_that_is_changed_in_place_later() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = x * 2
        h += m.a(h)  # type: ignore[operator]
        return m.b(h)  # type: ignore[operator,no-any-return]

    torch.manual_seed(1)
    model = Written(forward, a=nn.Linear(5, 5), b=nn.Linear(5, 3)).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    inputs = {"0": torch.randn(6, 5, dtype=torch.float64)}
    biases = {name: p for name, p in model.named_parameters() if p.requires_grad}
    expected = naive.flat(naive.rows(_squares(naive.outputs(model, inputs))[:, None], biases))[:, 0]
    result = per_sample_gradient(model, [inputs], _squares, wrt=["*bias"])
    assert naive.difference(naive.flat(result.arrays, lead=1), expected) <= naive.TOLERANCE


@pytest.mark.parametrize(
    "call",
    [
        lambda model, inputs: per_sample_gradient(model, [inputs], _squares),
        lambda model, inputs: jacobian(model, [inputs], reduce="vjp", vectors=torch.ones(6, 3)),
    ],
    ids=["rows", "vjp"],
)
def test_a_change_in_place_that_autograd_refuses_is_the_models_fault(
    call: Callable[..., object],
) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.b(m.a(x).sigmoid().mul_(2))  # type: ignore[operator,no-any-return]

    model = Written(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3))
    with pytest.raises(ModelCallFailed, match=r"shard 0: the backward pass.*inplace"):
        call(model, {"0": torch.randn(6, 5)})


GRAPHS = "graphs, one a shard"


def test_rows_of_graphs_are_reduced() -> None:
    way, target = built(GRAPHS), torch.randn(3, 2, dtype=torch.float64, device=DEVICE)
    rows = torch.einsum("by,byp->bp", target, torch.cat(expected_rows(GRAPHS)))
    found = per_sample_gradient(
        way.model,
        way.shards,
        lambda z, target: (z * target).sum(1),
        loss_inputs={"target": target},
        reduce="gram",
    )
    assert naive.difference(found.arrays["gram"], rows @ rows.T) <= naive.TOLERANCE


def test_rows_of_the_nodes_of_a_graph_are_refused() -> None:
    nodes = (
        Written(
            lambda m, nodes, edges: m.a(nodes).index_add(0, edges[1], m.a(nodes)[edges[0]]),
            a=nn.Linear(4, 5),
        )
        .double()
        .to(DEVICE)
    )
    with pytest.raises(NoBatchAxis, match="let each shard be one sample"):
        jacobian(nodes, built(GRAPHS).shards)


def test_an_edge_out_of_range_is_the_shards_own_error() -> None:
    way = built(GRAPHS)
    way.shards[0]["edges"][0, 0] = 7
    with pytest.raises(ModelCallFailed, match=r"out of (range|bounds)"):
        jacobian(way.model, way.shards)
