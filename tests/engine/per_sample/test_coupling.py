"""What has no gradient per sample is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradbox_engine.per_sample import (
    BadSampleLoss,
    CoupledSamples,
    NoBatchAxis,
    jacobian,
    per_sample_gradient,
)
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written

Job = Callable[..., Any]


def _inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"0": torch.randn(6, 4)}


@pytest.mark.parametrize(
    ("layer", "mode"),
    [
        (lambda: nn.BatchNorm1d(4), "train"),
        (lambda: nn.BatchNorm1d(4, track_running_stats=False), "eval"),
        (lambda: Written(lambda m, x: x - x.mean(0)), "eval"),
        (lambda: Written(lambda m, x: x + x.roll(1, 0)), "eval"),
        (lambda: Written(lambda m, x: torch.cat([x[1:], x[:1] * 0])), "eval"),
    ],
)
def test_a_layer_that_mixes_samples_is_named(layer: object, mode: str) -> None:
    assert callable(layer)
    model = nn.Sequential(nn.Linear(4, 4), layer(), nn.Linear(4, 2))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(CoupledSamples, match=r"'1'.*unchecked=\('coupling',\)"):
        jacobian(model, [_inputs()], mode=mode)  # type: ignore[arg-type]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_samples_that_a_sparse_matrix_mixes_are_refused() -> None:
    def neighbours(m: Any, x: Tensor, to: Tensor) -> Tensor:
        places = torch.stack([torch.arange(len(x)), to % len(x)])
        return torch.sparse.mm(
            torch.sparse_coo_tensor(places, x.new_ones(len(x)), (len(x),) * 2), m.a(x)
        )

    shard = {"x": torch.randn(5, 4), "to": torch.tensor([1, 2, 3, 4, 0])}
    with pytest.raises(CoupledSamples):
        jacobian(Written(neighbours, a=nn.Linear(4, 2)), [shard])


def test_coupling_can_be_let_through_by_name_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    result = jacobian(model, [_inputs()], mode="train", unchecked=["coupling", "self"])
    assert result.arrays["0.weight"].shape == (6, 2, 4, 4)


def test_gradients_scaled_by_counts_over_the_batch_are_refused() -> None:
    model = Written(lambda m, x: m.a(x).sum(1), a=nn.Embedding(9, 3, scale_grad_by_freq=True))
    with pytest.raises(CoupledSamples, match="scale_grad_by_freq"):
        jacobian(model, [{"0": torch.randint(0, 9, (4, 5))}])


@pytest.mark.parametrize(
    ("num_ids", "offsets"), [(8, [0, 3, 5, 6]), (3, [0, 2, 3]), (4, [0, 2, 2])]
)
def test_bags_by_offsets_are_told_how_to_be_samples(num_ids: int, offsets: list[int]) -> None:
    model = Written(lambda m, ids, offsets: m.a(ids, offsets), a=nn.EmbeddingBag(9, 3))
    shard = {"ids": torch.arange(num_ids), "offsets": torch.tensor(offsets)}
    with pytest.raises((NoBatchAxis, CoupledSamples), match=r"\(samples, ids of each\)") as caught:
        jacobian(model, [shard])
    assert "atch norm" not in str(caught.value)


def test_a_loss_that_mixes_samples_is_refused() -> None:
    with pytest.raises(CoupledSamples, match="loss"):
        per_sample_gradient(nn.Linear(4, 2), [_inputs()], lambda z: (z - z.mean(0)).square().sum(1))


def test_a_loss_of_another_shape_is_refused() -> None:
    with pytest.raises(BadSampleLoss, match=r"shape \(6,\), got \(\)"):
        per_sample_gradient(nn.Linear(4, 2), [_inputs()], lambda z: z.mean())


def test_an_output_without_samples_is_refused() -> None:
    with pytest.raises(NoBatchAxis, match="dim 0"):
        jacobian(Written(lambda m, x: m.a(x).sum(), a=nn.Linear(4, 2)), [_inputs()])


def _steps(m: Any, x: Tensor, length: Tensor) -> Tensor:
    for _ in range(int(length.max().item())):
        x = x + m.a(x).tanh() / 4
    z: Tensor = m.b(x)
    return z


def _until_all_converged(m: Any, x: Tensor, length: Tensor) -> Tensor:
    left = length.double()
    while bool((left > 0.5).any()):
        x, left = x + m.a(x).tanh() / 4, left - 1
    z: Tensor = m.b(x)
    return z


def _cut_to_the_longest(m: Any, x: Tensor, length: Tensor) -> Tensor:
    z: Tensor = m.b(m.a(x[:, :, None] * x[:, None])[:, : int(length.max())].tanh().mean(1))
    return z


def _sorted(m: Any, x: Tensor, length: Tensor) -> Tensor:
    """Samples that data put into another order: rows are compared in whole on every shard."""
    order = length.argsort(stable=True)
    return _cut_to_the_longest(m, x[order], length)[order.argsort()]


def _model(forward: Callable[..., Tensor], *, hooked: bool = False) -> nn.Module:
    torch.manual_seed(1)
    model = Written(forward, a=nn.Linear(5, 5), b=nn.Linear(5, 3)).double()
    for parameter in model.parameters() if hooked else ():
        parameter.register_hook(lambda gradient: gradient * 1)
    return model


def _decided(samples: int, longest: int) -> dict[str, Tensor]:
    """Return a shard whose first sample, which no seed below draws, decides for all."""
    x = torch.randn(samples, 5, generator=torch.Generator().manual_seed(0)).double()
    return {"x": x, "length": torch.tensor([longest] + [2] * (samples - 1))}


def _squares(z: Tensor) -> Tensor:
    return z.square().sum(1)


def _vjp(model: nn.Module, shards: list[dict[str, Tensor]], **how: Any) -> Any:
    u = torch.ones(sum(len(shard["x"]) for shard in shards), 3).double()
    return jacobian(model, shards, reduce="vjp", vectors=u, **how)


DECIDING = [_steps, _until_all_converged, _cut_to_the_longest, _sorted]
JOBS: list[Job] = [
    lambda model, shards, **how: per_sample_gradient(model, shards, _squares, **how),
    lambda model, shards, **how: per_sample_gradient(
        model, shards, _squares, reduce="clipped_sum", clip=1.0, **how
    ),
    jacobian,
    lambda model, shards, **how: jacobian(model, shards, budget_bytes=1, **how),
    _vjp,
]


@pytest.mark.parametrize("hooked", [False, True], ids=["rules", "loops"])
@pytest.mark.parametrize("job", JOBS, ids=["rows", "clipped", "jacobian", "in pieces", "vjp"])
@pytest.mark.parametrize("forward", DECIDING)
def test_what_the_batch_decides_without_a_derivative_is_refused_in_every_job(
    forward: Callable[..., Tensor], job: Job, hooked: bool
) -> None:
    model = _model(forward, hooked=hooked)
    for samples, seed in ((6, 0), (6, 1), (2, 0)):
        for _ in range(2):
            with pytest.raises(CoupledSamples, match=r"shard 0: expected z of sample \d called"):
                job(model, [_decided(samples, 4)], seed=seed)


@pytest.mark.parametrize("forward", DECIDING)
def test_what_a_later_batch_decides_is_refused_under_the_plan_of_another(
    forward: Callable[..., Tensor],
) -> None:
    model = _model(forward)
    expected = naive.flat(naive.jacobian(model, _decided(6, 2)))
    for _ in range(2):
        found = naive.flat(jacobian(model, [_decided(6, 2)]).arrays)
        assert naive.difference(found, expected) <= naive.TOLERANCE
    with pytest.raises(CoupledSamples, match=r"shard 0: expected z of sample 3 called"):
        jacobian(model, [_decided(6, 4)])


@pytest.mark.parametrize("forward", [_steps, _until_all_converged, _sorted])
def test_what_the_batch_decides_on_a_further_shard_is_refused_where_all_rows_are_compared(
    forward: Callable[..., Tensor],
) -> None:
    model = _model(forward)
    jacobian(model, [_decided(6, 2)])
    with pytest.raises(CoupledSamples, match=r"shard 1: expected z of sample 3 called"):
        jacobian(model, [_decided(6, 2), _decided(6, 4)])


@pytest.mark.parametrize("forward", DECIDING)
def test_rows_of_what_the_batch_decides_can_be_let_through(forward: Callable[..., Tensor]) -> None:
    model, inputs = _model(forward), _decided(6, 4)
    expected = naive.flat(naive.jacobian(model, inputs))
    for _ in range(2):
        found = jacobian(model, [inputs], unchecked=["coupling"])
        assert naive.difference(naive.flat(found.arrays), expected) <= naive.TOLERANCE


def test_a_model_whose_data_have_it_draw_random_numbers_is_not_called_alone() -> None:
    def forward(m: Any, x: Tensor, noisy: Tensor) -> Tensor:
        h = m.a(x).tanh()
        z: Tensor = m.b(F.dropout(h, 0.5) if noisy.all() else h)
        return z

    model, x = _model(forward), _decided(6, 2)["x"]
    for noisy in (torch.zeros(6), torch.ones(6)):
        inputs = {"x": x, "noisy": noisy.bool()}
        expected = naive.flat(naive.jacobian(model, inputs, seed=3))
        found = naive.flat(jacobian(model, [inputs], seed=3).arrays)
        assert naive.difference(found, expected) <= naive.TOLERANCE
