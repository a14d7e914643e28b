"""Random streams by sample: the cut into shards, and the padding, do not matter."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradbox_engine import (
    BadInputs,
    Group,
    Objective,
    SampleStreamRefused,
    set_gradient,
    set_outputs,
)
from tests import case_models
from tests.cases import CASES, spread
from tests.engine.per_sample.zoo import Written
from tests.engine.replay.running import answer
from tests.oracle import difference

BY_CUT = 1e-12


def _cut(tensor: Tensor, sizes: list[int]) -> list[dict[str, Tensor]]:
    return [{"0": rows} for rows in tensor.split(sizes)]


def _gradient(model, tensor, sizes, *, loss=spread, order=None, **terms):
    group = Group("z", _cut(tensor, sizes), order=order)
    told = {"mode": "train", "streams": "sample", "seed": 5}
    return set_gradient(model, [group], Objective(loss), **(told | terms)).grads


def _images(num: int = 12) -> Tensor:
    return torch.randn(num, 2, 6, 6, generator=torch.Generator().manual_seed(0)).double()


class _Dropouts(nn.Module):
    """Every dropout that torch.nn has, stochastic depth, and attention that drops."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3)
        self.dropouts = nn.Sequential(
            nn.Dropout(0.2), nn.Dropout2d(0.2), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1)
        )
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropouts(self.first(x)).flatten(2).transpose(1, 2)
        weighted, _ = self.attention(x, x, x)  # weights wanted: dim 0 is samples × heads
        fused = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.2)
        depth = x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7)
        return (weighted + fused[:, 0] * depth).mean(1)


def _dropouts() -> nn.Module:
    torch.manual_seed(0)
    return _Dropouts().double()


@pytest.mark.parametrize("retain", [0, 10**9])
def test_the_cut_into_shards_does_not_matter(retain):
    one = _gradient(_dropouts(), _images(), [12], retain=retain)
    many = _gradient(_dropouts(), _images(), [5, 1, 4, 2], retain=retain)
    assert difference(many, one) < BY_CUT


def test_with_streams_by_shard_it_does():
    one = _gradient(_dropouts(), _images(), [12], streams="shard")
    many = _gradient(_dropouts(), _images(), [5, 1, 4, 2], streams="shard")
    assert difference(many, one) > 0.1


def test_samples_keep_their_masks_when_they_are_packed():
    images = _images()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    packed = torch.empty_like(images)
    packed[order] = images

    def loss(z: Tensor) -> Tensor:
        return (z.sum(1) * torch.arange(12)).square().mean()

    plain = _gradient(_dropouts(), images, [12], loss=loss)
    reordered = _gradient(_dropouts(), packed, [5, 4, 3], loss=loss, order=order)
    assert difference(reordered, plain) < BY_CUT


def test_padding_does_not_matter():
    model = case_models.transformer()
    tokens = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([9, 5, 4, 3])

    def shard(rows: slice, length: int) -> dict[str, Tensor]:
        mask = torch.arange(length) < lengths[rows, None]
        return {"tokens": tokens[rows, :length], "mask": mask}

    def mean(hidden: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        mask_BT1 = inputs["mask"].unsqueeze(-1).to(hidden.dtype)
        return (hidden * mask_BT1).sum(1) / mask_BT1.sum(1)

    def gradient(shards):
        return set_gradient(
            model,
            [Group("z", shards)],
            Objective(spread),
            mode="train",
            streams="sample",
            output="hidden",
            readout=mean,
        ).grads

    padded = gradient([shard(slice(0, 4), 9)])
    trimmed = gradient([shard(slice(0, 1), 9), shard(slice(1, 3), 5), shard(slice(3, 4), 3)])
    assert difference(trimmed, padded) < BY_CUT


def test_masks_drop_the_share_that_was_asked_for():
    seen: list[Tensor] = []

    class Ones(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            out = torch.dropout(x * self.scale, 0.3, True)
            seen.append(out.detach())
            return out

    shards = [{"0": torch.ones(8, 5000)}, {"0": torch.ones(8, 5000)}]
    set_gradient(Ones(), [Group("z", shards)], Objective(torch.sum), mode="train", streams="sample")
    rows = torch.cat(seen[:2])
    assert (rows == 0).double().mean(1).sub(0.3).abs().max() < 0.03
    assert set(rows.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}
    agreement = ((rows[:, None] == 0) == (rows[None, :] == 0)).double().mean(-1)
    assert agreement.fill_diagonal_(0.58).sub(0.58).abs().max() < 0.03  # 0.3² + 0.7²


@pytest.mark.parametrize(
    "drop", [lambda x: F.dropout(x, 0.3), lambda x: torch.native_dropout(x, 0.3, True)[0]]
)
def test_each_operation_has_a_mask_of_its_own(drop):
    group = Group("z", [{"0": torch.ones(8, 5000)}])
    twice = Written(
        lambda m, x: torch.stack([drop(x * m.scale) for _ in range(2)], dim=1),
        scale=nn.Parameter(torch.ones(())),
    )
    found = set_outputs(twice, [group], mode="train", streams="sample")
    first, second = found.outputs["z"].unbind(1)
    assert set(first.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}
    agreement = ((first == 0) == (second == 0)).double().mean(-1)
    assert agreement.sub(0.58).abs().max() < 0.03  # 0.3² + 0.7²


def test_groups_and_seeds_have_masks_of_their_own():
    case = CASES["two towers"]()
    first, second = (answer(case, streams="sample", seed=seed).grads for seed in (1, 2))
    assert difference(first, second) > 1e-3


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda x: torch.randn(3), "aten.randn.default is not a dropout"),
        (lambda x: torch.rand_like(x).sum(), "aten.rand_like.default"),
        (lambda x: torch.dropout(torch.ones(3), 0.5, True), r"shape \(3,\), whose dim 0"),
        (lambda x: torch.dropout(torch.ones(()), 0.5, True), r"shape \(\), whose dim 0"),
        (lambda x: random.random(), "global generator"),
        (lambda x: numpy.random.random(), "global generator"),
        (lambda x: torch.multinomial(torch.ones(3), 1), "aten.multinomial.default"),
    ],
)
def test_what_cannot_be_keyed_by_sample_is_refused_by_name(draw, message):
    shards = [{"0": torch.ones(2, 5)}] * 2
    model = Written(lambda m, x: m.linear(x) + draw(x), linear=nn.Linear(5, 3))
    with pytest.raises(SampleStreamRefused, match=message):
        set_gradient(model, [Group("z", shards)], Objective(torch.sum), streams="sample")


def test_checkpointing_that_draws_again_is_refused():
    block = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    model = Written(lambda m, x: checkpoint(m.block, x, use_reentrant=False), block=block)
    shards = [{"0": torch.ones(2, 5)}] * 2
    with pytest.raises(SampleStreamRefused, match="during a backward pass"):
        set_gradient(
            model,
            [Group("z", shards)],
            Objective(torch.sum),
            mode="train",
            streams="sample",
        )


def test_modules_that_drop_with_time_first_are_refused_by_name():
    with pytest.raises(SampleStreamRefused, match="LSTM 'lstm'"):
        answer(CASES["lstm"](), streams="sample")


def test_without_dropout_nothing_is_refused():
    none, some = (answer(CASES["lstm"](), mode="eval", streams=s) for s in ("shard", "sample"))
    assert difference(some.grads, none.grads) < BY_CUT


def test_arguments_without_samples_along_the_first_dimension():
    shards = [{"x": torch.ones(2, 5), "y": torch.ones(3)}]
    with pytest.raises(BadInputs, match="samples along dim 0"):
        set_gradient(nn.Linear(5, 3), [Group("z", shards)], Objective(torch.sum), streams="sample")


def test_with_probability_one_everything_is_kept():
    """As the first layer of a stochastic depth keeps whole samples."""
    shards = [{"0": torch.ones(size, 4, dtype=torch.float64)} for size in (3, 0, 2)]
    group, objective = Group("z", shards), Objective(torch.sum)
    model = Written(
        lambda m, x: m.linear(x) * x.new_empty(x.shape[0], 1).bernoulli_(1.0),
        linear=nn.Linear(4, 3).double(),
    )
    result = set_gradient(model, [group], objective, streams="sample", returns=("outputs",))
    assert torch.equal(result.outputs["z"], model.linear(torch.ones(5, 4, dtype=torch.float64)))
