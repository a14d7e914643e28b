"""What has no gradient per sample is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import (
    BadSampleLoss,
    CoupledSamples,
    NoBatchAxis,
    jacobian,
    per_sample_gradient,
)
from tests.engine.per_sample.zoo import Written


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
