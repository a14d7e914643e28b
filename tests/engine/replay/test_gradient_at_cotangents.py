"""Outputs first and cotangents later: the two halves of a gradient whose loss runs elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import (
    Group,
    Objective,
    ReplayMismatch,
    SetOutputs,
    gradient_at_cotangents,
    set_gradient,
    set_outputs,
)
from gradbox_engine.errors import BadInputs
from gradbox_engine.requests import CotangentGradient
from tests import case_models
from tests.cases import CASES
from tests.device import same_bits
from tests.engine.replay.halves import first_half, first_outputs
from tests.engine.replay.running import answer
from tests.oracle import TOLERANCE, difference


def shards_of(*sizes: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"0": torch.randn(n, 5, generator=generator, dtype=torch.float64)} for n in sizes]


def mean_exp(z: Tensor) -> Tensor:
    return z.exp().mean()


def cotangent_of(answer: SetOutputs) -> Tensor:
    z = answer.outputs["z"]
    assert isinstance(z, Tensor)
    leaf = z.clone().requires_grad_()
    return torch.autograd.grad(mean_exp(leaf), leaf)[0]


def in_halves(model: nn.Module, groups: Sequence[Group], **terms: object) -> CotangentGradient:
    wrt = terms.pop("wrt", None)
    answer = set_outputs(model, groups, **terms)
    cotangents = {"z": {"": cotangent_of(answer)}}
    return gradient_at_cotangents(
        model,
        groups,
        cotangents,
        first_outputs(answer),
        wrt=wrt,
        **terms,
    )


@pytest.mark.parametrize(
    "terms",
    [
        {"mode": "train", "seed": 4},
        {"precision": "fp64"},
        {"precision": "fp16"},
        {"precision": "bf16"},
        {"mode": "train", "streams": "sample"},
        {"wrt": ["2.*", "inputs.0"]},
    ],
    ids=str,
)
def test_both_halves_make_one_gradient(terms: dict[str, object]) -> None:
    model = case_models.mlp().float()
    shards = [{"0": shard["0"].float()} for shard in shards_of(4, 3, 2)]
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    groups = [Group("z", shards, order=order)]
    halves = in_halves(model, groups, **dict(terms))
    whole = set_gradient(model, groups, Objective(mean_exp), **terms)
    tolerance = 1e-2 if terms.get("precision") in ("fp16", "bf16") else 1e-5
    assert difference(halves.grads, whole.grads) <= tolerance
    assert halves.replay_difference == 0
    if whole.input_grads is not None:
        assert halves.input_grads is not None
        for mine, theirs in zip(
            halves.input_grads["z"]["0"], whole.input_grads["z"]["0"], strict=True
        ):
            torch.testing.assert_close(mine, theirs)


class Counting(nn.Module):
    """Counts its calls where nobody can put it back; the count may get into the output."""

    def __init__(self, *, leaking: bool, buffered: bool = False) -> None:
        super().__init__()
        self.inner = case_models.mlp()
        self.calls = itertools.count()
        self.leaking = leaking
        if buffered:
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(getattr(self, "seen", None), Tensor):
            self.seen += 1
        return self.inner(x) + (next(self.calls) if self.leaking else 0)


@pytest.mark.parametrize("retain", [0, 10**9])
@pytest.mark.parametrize("buffered", [False, True])
def test_a_model_that_does_not_repeat_itself_gives_no_gradient(buffered: bool, retain: int) -> None:
    """Neither in the replay nor, where buffers change, in the first pass that is made again."""
    model = Counting(leaking=True, buffered=buffered)
    groups = [Group("z", shards_of(4, 3))]
    answer = set_outputs(model, groups)
    cotangents = {"z": {"": cotangent_of(answer)}}
    with pytest.raises(ReplayMismatch, match="shard"):
        gradient_at_cotangents(model, groups, cotangents, first_outputs(answer), retain=retain)


@pytest.mark.parametrize(("buffered", "expected"), [(False, [3]), (True, [4, 3, 2, 3])])
def test_shards_without_a_cotangent_run_only_where_buffers_change(
    buffered: bool, expected: list[int]
) -> None:
    model = Counting(leaking=False, buffered=buffered)
    groups = [Group("z", shards_of(4, 3, 2))]
    answer = set_outputs(model, groups)
    cotangent = torch.zeros(9, 3, dtype=torch.float64)
    cotangent[4:7] = 1
    log: list[int] = []
    model.inner.register_forward_hook(lambda m, args, z: log.append(len(z)))
    found = gradient_at_cotangents(model, groups, {"z": {"": cotangent}}, first_outputs(answer))
    assert log == expected
    plain = case_models.mlp()
    plain(groups[0].shards[1]["0"]).sum().backward()
    expected_grads = {f"inner.{n}": p.grad for n, p in plain.named_parameters()}
    assert difference(found.grads, expected_grads) <= TOLERANCE


def test_zeros_reach_what_they_reach() -> None:
    model = case_models.frozen()
    groups = [Group("z", shards_of(4, 3))]
    answer = set_outputs(model, groups)
    zeros = {"z": {"": torch.zeros(7, 3, dtype=torch.float64)}}
    found = gradient_at_cotangents(model, groups, zeros, first_outputs(answer))
    assert all(not gradient.any() for gradient in found.grads.values())
    whole = set_gradient(model, groups, Objective(mean_exp))
    assert set(found.unreached) == set(whole.unreached)


def test_no_cotangent_at_all_is_refused() -> None:
    model = case_models.mlp()
    groups = [Group("z", shards_of(4))]
    answer = set_outputs(model, groups)
    with pytest.raises(BadInputs, match="cotangents"):
        gradient_at_cotangents(model, groups, {}, first_outputs(answer))


class _Stop(Exception):
    pass


class StopsAt:
    def __init__(self, phase: str, done: int) -> None:
        self._at = (phase, done)

    def step(self, phase: str, done: int, total: int) -> None:
        if (phase, done) == self._at:
            raise _Stop


@pytest.mark.parametrize("phase", ["forward", "replay"])
def test_a_stopped_half_leaves_the_model_as_it_was(phase: str) -> None:
    model = case_models.cnn().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shards = [{"0": torch.randn(3, 2, 6, 6, dtype=torch.float64)} for _ in range(3)]
    groups = [Group("z", shards)]
    answer = set_outputs(model, groups, mode="train")
    cotangents = {"z": {"": cotangent_of(answer)}}
    halves: dict[str, Callable[[StopsAt], object]] = {
        "forward": lambda stop: set_outputs(model, groups, mode="train", observer=stop),
        "replay": lambda stop: gradient_at_cotangents(
            model, groups, cotangents, first_outputs(answer), mode="train", observer=stop
        ),
    }
    with pytest.raises(_Stop):
        halves[phase](StopsAt(phase, 1))
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("retain", [0, 10**9])
@pytest.mark.parametrize("name", CASES)
def test_the_sum_has_the_same_order_in_one_job_and_in_two_halves(name: str, retain: int) -> None:
    case = CASES[name]()
    whole = answer(case, returns=("grads", "cotangents"))
    assert whole.cotangents is not None
    cotangents = {g: {"": z} if isinstance(z, Tensor) else z for g, z in whole.cotangents.items()}
    found = first_half(case, retain=retain).gradient(cotangents).grads
    assert all(same_bits(whole.grads[name], gradient) for name, gradient in found.items())
