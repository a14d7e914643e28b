"""What the engine does not accept, and what it says."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import (
    BadInputs,
    BadOutput,
    BadWeights,
    GraphInBuffer,
    Group,
    LossNotFinite,
    LossNotScalar,
    Objective,
    ReplayMismatch,
    UnknownParameter,
    set_gradient,
)
from tests import case_models
from tests.cases import CASES
from tests.engine.replay.running import answer


def _gradient(model, shards, loss=torch.sum, **terms):
    return set_gradient(model, [Group("z", shards)], Objective(loss), **terms)


def _shards(num=3):
    return [{"0": torch.randn(2, 5, dtype=torch.float64)} for _ in range(num)]


@pytest.mark.parametrize("wrt", [["decoder.*"], ["*", "nothing"], ["counts"]])
def test_a_pattern_that_matches_nothing(wrt):
    with pytest.raises(UnknownParameter, match=r"expected a pattern .* did you mean"):
        _gradient(case_models.frozen(), _shards(), wrt=wrt)


def test_a_misspelt_module_is_told_the_module():
    with pytest.raises(UnknownParameter, match=r"did you mean 'stem\.0'"):
        _gradient(case_models.frozen(), _shards(), wrt=["stems.0"])


@pytest.mark.parametrize("loss", [lambda z: z, lambda z: z.argmax(), lambda z: 3.0, torch.std_mean])
def test_a_loss_that_is_not_a_scalar(loss):
    with pytest.raises(LossNotScalar, match="one real floating-point entry"):
        _gradient(case_models.mlp(), _shards(), loss)


@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
def test_a_loss_that_is_not_finite(factor):
    with pytest.raises(LossNotFinite, match="expected a finite number"):
        _gradient(case_models.mlp(), _shards(), lambda z: z.sum() * factor)


def test_an_output_that_is_no_tensor_lists_what_there_is():
    case = CASES["transformer"]()
    with pytest.raises(BadOutput, match=r"dict with hidden: float64 tensor \(3, 5, 8\), logits.*"):
        answer(case, output=None, readout=None)


@pytest.mark.parametrize("output", ["states", "hidden.grad", "layers.2", "layers.1"])
def test_an_output_that_is_not_there(output):
    with pytest.raises(BadOutput):
        answer(CASES["transformer"](), output=output, readout=None)


def test_integers_as_z():
    with pytest.raises(BadOutput, match="real floating-point"):
        answer(CASES["mlp"](), readout=lambda z, _: z.argmax(-1))


def test_shards_whose_z_differ_in_more_than_the_samples():
    case = CASES["transformer"]()
    with pytest.raises(BadOutput, match=r"\(3, 7, 8\) from shard 1 .* pool over the dimension"):
        answer(case, readout=None)


@pytest.mark.parametrize(
    ("readout", "message"),
    [
        (lambda z, _: {"a": z, "b": z[:1]}, "shard 0: expected outputs with one number of samples"),
        (lambda z, _: {"a": z, "scale": z.sum()}, r"'scale' \(\); by readout= expand one number"),
        (lambda z, _: {"ab"[len(z) - 2]: z}, r"shard 1: expected \['a'\] as from shard 0, got 'b'"),
        (lambda z, _: z.float() if len(z) == 3 else z, "one dtype .* got torch.float32"),
    ],
)
def test_shards_whose_z_have_no_place_in_one(readout, message):
    shards = [{"0": torch.ones(n, 5, dtype=torch.float64)} for n in (2, 3)]
    with pytest.raises(BadOutput, match=message):
        _gradient(case_models.mlp(), shards, readout=readout)


def test_shards_with_different_argument_names():
    shards = [*_shards(), {"x": torch.ones(2, 5)}]
    with pytest.raises(BadInputs, match=r"shard 3: .* \['0'\], got \['x'\]"):
        _gradient(case_models.mlp(), shards)


def test_positions_with_a_gap():
    with pytest.raises(BadInputs, match="without gaps, got"):
        _gradient(case_models.mlp(), [{"1": torch.ones(2, 5)}])


@pytest.mark.parametrize("groups", [[], [Group("z", [])], [Group("z", _shards())] * 2])
def test_groups_that_cannot_be_called(groups):
    with pytest.raises(BadInputs):
        set_gradient(case_models.mlp(), groups, Objective(torch.sum))


def test_an_entry_point_that_is_not_there():
    group = Group("z", _shards(), method="encode_sound")
    with pytest.raises(BadInputs, match="expected a method of Towers, got 'encode_sound'"):
        set_gradient(case_models.towers(), [group], Objective(torch.sum))


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6]])
def test_an_order_that_is_no_permutation(order):
    with pytest.raises(BadInputs, match="permutation of 6 samples"):
        set_gradient(case_models.mlp(), [Group("z", _shards(), order=order)], Objective(torch.sum))


def test_an_order_of_other_than_whole_numbers():
    group = Group("z", _shards(), order=torch.arange(6.0) + 0.5)
    with pytest.raises(BadInputs, match="whole numbers"):
        set_gradient(case_models.mlp(), [group], Objective(torch.sum))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"decoder": torch.zeros(3)}, "no parameter or buffer"),
        ({"0.bias": torch.zeros(3, dtype=torch.float64)}, r"expected shape \(8,\), got \(3,\)"),
        ({"0.bias": torch.zeros(8)}, r"expected torch.float64, got torch.float32"),
    ],
)
def test_weights_that_do_not_fit(weights, message):
    with pytest.raises(BadWeights, match=message):
        _gradient(case_models.mlp(), _shards(), weights=weights)


def test_two_names_of_one_tensor_with_different_weights():
    weights = {
        "embedding.weight": torch.zeros(11, 8, dtype=torch.float64),
        "out.weight": torch.ones(11, 8, dtype=torch.float64),
    }
    with pytest.raises(BadWeights, match="one tied tensor"):
        answer(CASES["transformer"](), weights=weights)


class _Counting(nn.Module):
    """Keeps state in an iterator, where no replay can find it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3).double()
        self.calls = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * next(self.calls)


class _OneEntryOff(nn.Module):
    """Differs in its replay in one entry of z, and there by a thousandth."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3).double()
        self.calls = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return z + torch.eye(*z.shape, dtype=z.dtype) * (0.001 if next(self.calls) == 5 else 0)


class _AnotherShape(_Counting):
    """Returns another shape in its replay."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return z.flatten() if next(self.calls) == 5 else z


@pytest.mark.parametrize("model", [_Counting, _OneEntryOff, _AnotherShape])
def test_a_replay_that_does_not_repeat_the_first_pass(model):
    with pytest.raises(ReplayMismatch, match=r"group 'z', shard \d: .* move it into a buffer"):
        _gradient(model(), _shards(), torch.var)


def test_a_difference_within_the_tolerance_is_told():
    calls = itertools.count(1)
    result = _gradient(
        case_models.mlp(),
        _shards(),
        torch.var,
        readout=lambda z, _: z * (1 + 1e-12 * (next(calls) == 5)),
    )
    assert 1e-13 < result.replay_difference < 1e-11


def test_a_replay_that_returns_other_names():
    calls = itertools.count(1)
    with pytest.raises(ReplayMismatch, match="shard 1: the replay returned no 'a'"):
        _gradient(
            case_models.mlp(),
            _shards(),
            lambda z: z["a"].square().sum(),
            readout=lambda z, _: {"b" if next(calls) == 5 else "a": z},
        )


def test_the_same_not_a_number_in_both_passes_is_no_mismatch():
    def masked(z: Tensor) -> Tensor:
        return torch.where(z.isfinite(), z, 0.0).var()

    class WithHoles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            holes = torch.tensor([0.0, torch.nan, torch.inf, -torch.inf], dtype=x.dtype)
            return self.linear(x) + holes

    assert _gradient(WithHoles(), _shards(), masked).replay_difference == 0


class _GraphAcrossShards(nn.Module):
    average: Tensor

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3).double()
        self.register_buffer("average", torch.zeros(3, dtype=torch.float64))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        if self.in_place:
            self.average.mul_(0.5).add_(z.mean(0))
        else:
            self.average = 0.5 * self.average + z.mean(0)
        return z - self.average


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_carries_a_graph_into_the_next_shard(in_place):
    model = _GraphAcrossShards(in_place=in_place)
    buffer = model.average
    with pytest.raises(GraphInBuffer, match="'average'"):
        _gradient(model, _shards())
    assert model.average is buffer
    assert not buffer.requires_grad
    assert buffer.eq(0).all()
