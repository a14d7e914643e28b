"""Under a plan that an earlier job confirmed: one row in some jobs, and what takes all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import CoupledSamples, jacobian, per_sample_gradient, shard_run
from gradbox_factors import Outer
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written

B = 6


def _squares(z: Tensor) -> Tensor:
    return z.square().sum(1)


def _x(samples: int = B) -> Tensor:
    return torch.randn(samples, 5, generator=torch.Generator().manual_seed(0)).double()


def _two_layers(forward: Any = lambda m, x: m.b(m.a(x).tanh())) -> nn.Module:
    torch.manual_seed(1)
    return Written(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3)).double()


def _rows(model: nn.Module, inputs: dict[str, Tensor], seed: int = 0) -> Tensor:
    losses = _squares(naive.outputs(model, inputs, seed=seed))[:, None]
    return naive.flat(naive.rows(losses, dict(model.named_parameters())))[:, 0]


def _exact_or_refused(model: nn.Module, inputs: dict[str, Tensor], seed: int) -> bool:
    """Say whether a job gives autograd's rows or refuses the model."""
    try:
        found = per_sample_gradient(model, [inputs], _squares, seed=seed)
    except CoupledSamples:
        return True
    return naive.difference(naive.flat(found.arrays, lead=1), _rows(model, inputs)) < 1e-10


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of samples in each comparison."""
    compared: list[int] = []
    compare = shard_run.compare

    def counted(expected: Any, terms: Any, **how: Any) -> Any:
        compared.append(next(iter(terms.values())).samples)
        return compare(expected, terms, **how)

    monkeypatch.setattr(shard_run, "compare", counted)
    return compared


def test_a_new_plan_is_compared_in_whole_and_a_kept_one_by_one_row(whole: list[int]) -> None:
    model = _two_layers()
    for _ in range(3):
        per_sample_gradient(model, [{"0": _x()}] * 2, _squares)
    assert whole == [B, 1, 1]


def test_a_row_is_compared_once_in_a_job_of_shards_of_two_shapes(whole: list[int]) -> None:
    model, shards = _two_layers(), [{"0": _x()}, {"0": _x(B - 1)}] * 2
    found = [per_sample_gradient(model, shards, _squares) for _ in range(2)]
    assert whole == [B, B - 1, 1]
    assert [result.rows_compared for result in found] == ["all", "one"]


@pytest.mark.parametrize(
    ("number", "shards", "compared"), [(0.4, 4, 0), (0.3, 4, 1), (0.999, 10, 0), (0.999, 11, 1)]
)
def test_a_small_job_compares_a_row_where_its_number_is_below_a_64th_of_its_samples(
    number: float, shards: int, compared: int, whole: list[int]
) -> None:
    model = _two_layers()
    inputs = [{"0": _x()}] * shards
    first = per_sample_gradient(model, inputs, _squares, check_number=number)
    assert (first.rows_compared, whole) == ("all", [B])
    second = per_sample_gradient(model, inputs, _squares, check_number=number)
    assert whole == [B, *[1] * compared]
    assert second.rows_compared == ("one" if compared else "none")
    assert all(torch.equal(first.arrays[name], rows) for name, rows in second.arrays.items())


def test_a_vjp_calls_a_sample_alone_only_where_a_row_is_due() -> None:
    calls = []

    def forward(m: Any, x: Tensor) -> Tensor:
        calls.append(len(x))
        z: Tensor = m.b(m.a(x).tanh())
        return z

    model = _two_layers(forward)
    vectors = torch.ones(B, 3, dtype=torch.float64)
    for number, expected in [(0.0, [3, 4, 4, B, 1]), (0.5, [B]), (0.0, [B, 1])]:
        calls.clear()
        jacobian(model, [{"0": _x()}], reduce="vjp", vectors=vectors, check_number=number)
        assert calls == expected


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _all_or_not(x: Tensor) -> Tensor:
    return x.tanh() if (x < 1e9).all() else x.relu()


@pytest.mark.parametrize(
    ("function", "compared"),
    [
        (lambda h: h / h.detach().abs().max().clamp_min(1e9), "one"),
        (lambda h: h * max(1.0, float(h.detach().abs().max() * 1e-9)), "one"),
        (lambda h: h[:, : int((h[0] < 1e9).sum())], "one"),
        (lambda h: _Copy.apply(h), "one"),
        (lambda h: h / h.detach().abs().amax(1, keepdim=True), "none"),
        (lambda h: h.new_ones(1) * h, "none"),
        (_all_or_not, "none"),
    ],
    ids=["tensor", "number", "length", "custom", "of each", "new", "branch"],
)
def test_a_number_that_samples_share_has_a_row_compared_in_every_job(
    function: Any, compared: str
) -> None:
    model = _two_layers(lambda m, x: m.b(function(m.a(x))))
    for _ in range(2):
        result = per_sample_gradient(model, [{"0": _x()}], _squares, check_number=0.999)
    assert result.rows_compared == compared


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_a_row_that_goes_wrong_later_is_found(
    samples: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = _two_layers(), {"0": _x(samples)}
    per_sample_gradient(model, [inputs], _squares)
    vjp = Outer.vjp
    monkeypatch.setattr(Outer, "vjp", lambda self, u: 1.01 * vjp(self, u))
    result = per_sample_gradient(model, [inputs], _squares, seed=seed)
    assert set(result.loops) == {"a.weight", "b.weight"}
    assert naive.difference(naive.flat(result.arrays, lead=1), _rows(model, inputs)) < 1e-10


def test_a_sample_whose_loss_is_flat_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = _two_layers(), {"0": _x()}

    def loss(z: Tensor, share: Tensor) -> Tensor:
        return z.square().sum(1) * share

    share = torch.tensor([0.0, 0, 0, 0, 1, 0]).double()
    per_sample_gradient(model, [inputs], loss, loss_inputs={"share": share})
    vjp = Outer.vjp
    monkeypatch.setattr(Outer, "vjp", lambda self, u: 1.01 * vjp(self, u))
    for seed in range(3):
        result = per_sample_gradient(
            model, [inputs], loss, loss_inputs={"share": share}, seed=seed, reduce="norm"
        )
        assert result.loops


def _rolled(m: Any, x: Tensor, share: Tensor) -> Tensor:
    h = m.a(x).tanh()
    z: Tensor = m.b(h + share * h.roll(1, 0))
    return z


def _averaged(m: Any, x: Tensor, share: Tensor) -> Tensor:
    h = m.a(x).tanh()
    z: Tensor = m.b(h + share * h.square().mean(0))
    return z


def _branched(m: Any, x: Tensor, share: Tensor) -> Tensor:
    h = m.a(x).tanh()
    z: Tensor = m.b(h + share * h.roll(1, 0) if share.any() else h + share)
    return z


@pytest.mark.parametrize("forward", [_rolled, _averaged, _branched])
@pytest.mark.parametrize("seed", range(B))
def test_one_sample_that_data_couple_with_another_is_seen_whichever_row_is_drawn(
    forward: Any, seed: int
) -> None:
    model, share = _two_layers(forward), torch.zeros(B, 1, dtype=torch.int64)
    per_sample_gradient(model, [{"x": _x(), "share": share}], _squares)
    coupled = share.clone()
    coupled[3] = 1
    assert _exact_or_refused(model, {"x": _x(), "share": coupled}, seed)


@pytest.mark.parametrize("seed", range(B))
def test_a_loss_that_couples_two_samples_is_refused_under_a_kept_plan(seed: int) -> None:
    def loss(z: Tensor, share: Tensor) -> Tensor:
        return (z + share * z.roll(1, 0)).square().sum(1)

    model, share = _two_layers(), torch.zeros(B, 1).double()
    per_sample_gradient(model, [{"0": _x()}], loss, loss_inputs={"share": share}, seed=seed)
    share[1] = 1
    for number in (0.0, 0.999):
        with pytest.raises(CoupledSamples, match="loss"):
            per_sample_gradient(
                model,
                [{"0": _x()}],
                loss,
                loss_inputs={"share": share},
                seed=seed,
                check_number=number,
            )


def test_a_loss_whose_numbers_hide_that_it_couples_samples_is_refused_in_every_job() -> None:
    def loss(z: Tensor) -> Tensor:
        means = z.mean(0)
        return (z + means - means.detach()).square().sum(1)

    model = _two_layers()
    per_sample_gradient(model, [{"0": _x()}], _squares)
    with pytest.raises(CoupledSamples, match="loss"):
        per_sample_gradient(model, [{"0": _x()}], loss, check_number=0.999)


def test_a_coupling_without_a_derivative_is_seen_in_the_drawn_sample() -> None:
    def forward(m: Any, x: Tensor, share: Tensor) -> Tensor:
        z: Tensor = m.b(m.a(x).tanh() + (share * x).mean(0).sum())
        return z

    model, share = _two_layers(forward), torch.zeros(B, 1, dtype=torch.int64)
    per_sample_gradient(model, [{"x": _x(), "share": share}], _squares)
    with pytest.raises(CoupledSamples):
        per_sample_gradient(model, [{"x": _x(), "share": share + 1}], _squares)


def test_dropout_leaves_the_row_to_the_shard_s_own_graph(whole: list[int]) -> None:
    calls = []

    def forward(m: Any, x: Tensor) -> Tensor:
        calls.append(len(x))
        z: Tensor = m.b(nn.functional.dropout(m.a(x), 0.5, m.training))
        return z

    model = _two_layers(forward)
    per_sample_gradient(model, [{"0": _x()}], _squares, mode="train")
    calls.clear(), whole.clear()
    result = per_sample_gradient(model, [{"0": _x()}], _squares, mode="train", seed=1)
    assert (calls, whole) == ([B], [1])
    expected = _rows(model.train(), {"0": _x()}, seed=1)
    assert naive.difference(naive.flat(result.arrays, lead=1), expected) < 1e-10


@pytest.mark.parametrize("from_job", [0, 1])
def test_a_model_that_takes_no_sample_alone_is_asked_once(from_job: int) -> None:
    """In the job that makes the plan; a later one runs the shard anew, to compare the row in it."""
    calls: list[int] = []

    def forward(m: Any, x: Tensor, whole: Tensor) -> Tensor:
        calls.append(len(x))
        if len(x) == 1 and whole.all():
            raise ValueError("expected more than one sample")
        z: Tensor = m.b(m.a(x).tanh())
        return z

    model = _two_layers(forward)
    for job, expected in enumerate([[3, 4, 4, B, 1], [B, 1, B] if from_job else [B], [B]]):
        calls.clear()
        inputs = {"x": _x(), "whole": torch.full((B,), job >= from_job)}
        result = per_sample_gradient(model, [inputs], _squares)
        assert calls == expected
        assert naive.difference(naive.flat(result.arrays, lead=1), _rows(model, inputs)) < 1e-10


def test_slopes_of_very_different_sizes_are_no_coupling() -> None:
    """One output's slope is so small that a weight below 1 would underflow."""
    scale = torch.tensor([1.0, 1e-33, 1e9])
    model, x = nn.Linear(5, 3), _x(40).float()
    for seed in range(3):
        result = per_sample_gradient(
            model, [{"0": x}], lambda z: (z.square() * scale).sum(1), seed=seed
        )
        assert not result.loops
