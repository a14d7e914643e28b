"""A forward pass that writes to its own parameters is refused, and goes on to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, ModelCallFailed, Objective, mixed_gradient, set_gradient
from gradbox_engine.model.state.written_parameters import why_load_again
from gradbox_engine.per_sample import per_sample_gradient
from tests.device import DEVICE, moved


class _FromFirstBatch(nn.Module):
    """A scale whose first numbers come from the first batch."""

    begun: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if not self.begun:
            self.scale.data.copy_(h.detach().std(0))
            self.begun.fill_(True)
        return h * self.scale


class _Failing(_FromFirstBatch):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise ValueError("later")


def _shards() -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    return [moved({"0": torch.randn(5, 4)})]


def _y() -> Tensor:
    return torch.ones(3, requires_grad=True, device=DEVICE)


def _mixed(model: nn.Module) -> Any:
    y = _y()
    inner = Objective(lambda y, v: (v @ y).pow(2).sum(), {"y": y}, {"y": y})
    return mixed_gradient(model, Group("z", _shards()), inner, Objective(lambda d: d.pow(2).sum()))


JOBS: dict[str, Callable[[nn.Module], Any]] = {
    "set": lambda m: set_gradient(m, [Group("z", _shards())], Objective(lambda z: z.pow(2).sum())),
    "samples": lambda m: per_sample_gradient(
        m, _shards(), lambda z: z.pow(2).sum(1), unchecked=["coupling"]
    ),
    "mixed": _mixed,
}


@pytest.mark.parametrize("job", JOBS)
def test_every_job_is_refused(job: str) -> None:
    model = _FromFirstBatch().to(DEVICE)
    for _ in range(2):
        with pytest.raises(ModelCallFailed, match=r"'scale'.*builder call it once"):
            JOBS[job](model)


class _Halving(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        self.weight.data.mul_(0.5)
        return super().forward(input)


COMPARED: dict[str, Callable[[nn.Module], Any]] = {
    "replay": lambda m: set_gradient(
        m, [Group("z", 2 * _shards())], Objective(lambda z: z.pow(2).sum())
    ),
    "samples": lambda m: per_sample_gradient(m, _shards(), lambda z: z.pow(2).sum(1)),
}


@pytest.mark.parametrize("job", COMPARED)
def test_it_is_named_where_a_comparison_of_two_calls_notices_it_first(job: str) -> None:
    with pytest.raises(ModelCallFailed, match="'weight'"):
        COMPARED[job](_Halving(4, 3).to(DEVICE))


def test_a_job_that_fails_leaves_a_refusal_behind() -> None:
    model = _Failing().to(DEVICE)
    with pytest.raises(ModelCallFailed, match="later"):
        JOBS["set"](model)
    with pytest.raises(ModelCallFailed, match="'scale'"):
        JOBS["set"](model)


@pytest.mark.parametrize("job", JOBS)
def test_a_model_that_was_called_where_it_was_built_runs(job: str) -> None:
    model = _FromFirstBatch().to(DEVICE)
    model(_shards()[0]["0"])
    for _ in range(2):
        JOBS[job](model)


def test_numbers_that_a_job_brings_may_be_written_to() -> None:
    model = _FromFirstBatch().to(DEVICE)
    group, loss = Group("z", _shards()), Objective(lambda z: z.pow(2).sum())
    set_gradient(model, [group], loss, weights={"scale": torch.ones(3)})
    assert model.scale.eq(1).all()


class _Decaying(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        self.weight.data.mul_(0.5)
        return super().forward(input)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_first_job_with_numbers_of_its_own_leaves_the_check_to_the_next(precision: Any) -> None:
    model = _Decaying(4, 3).to(DEVICE)
    registered = model.weight.detach().clone()
    group, loss = Group("z", _shards()), Objective(lambda z: z.pow(2).sum())
    own = None if precision == "fp64" else {"weight": torch.ones(3, 4)}
    set_gradient(model, [group], loss, weights=own, precision=precision)
    assert torch.equal(model.weight, registered)
    with pytest.raises(ModelCallFailed, match="'weight'"):
        set_gradient(model, [group], loss)


def test_weights_may_change_between_jobs() -> None:
    model = nn.Linear(4, 3).to(DEVICE)
    for _ in range(2):
        JOBS["set"](model)
        with torch.no_grad():
            model.weight.mul_(2)


class _Clipped(nn.Module):
    """Clips its weights in every pass, which changes something only where one exceeds the limit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 2.0, -1.0]))

    def forward(self, x: Tensor) -> Tensor:
        bound = x.detach().abs().max()
        with torch.no_grad():
            self.weight.clamp_(-bound, bound)
        return x * self.weight


def _clipped(largest: float) -> Any:
    group = Group("z", [moved({"0": torch.full((4, 3), largest)})])
    return [group], Objective(lambda z: z.pow(2).sum())


def test_a_later_job_that_is_the_first_to_write_is_refused() -> None:
    model = _Clipped().to(DEVICE)
    for _ in range(3):  # its version counter moves in each of them, its numbers do not
        set_gradient(model, *_clipped(4.0))
    with pytest.raises(ModelCallFailed, match="'weight'"):
        set_gradient(model, *_clipped(1.0))
    with pytest.raises(ModelCallFailed, match="'weight'"):
        set_gradient(model, *_clipped(4.0))


def test_a_later_job_that_fails_after_it_wrote_leaves_a_refusal_behind() -> None:
    model = _Clipped().to(DEVICE)
    set_gradient(model, *_clipped(4.0))
    groups, _ = _clipped(1.0)
    with pytest.raises(ModelCallFailed, match="ZeroDivisionError"):
        set_gradient(model, groups, Objective(lambda z: z.sum() / (1 // 0)))
    assert "'weight'" in (why_load_again(model) or "")


def test_what_the_caller_wrote_between_jobs_is_not_the_jobs() -> None:
    model = _Clipped().to(DEVICE)
    set_gradient(model, *_clipped(4.0))
    with torch.no_grad():
        model.weight.mul_(1.5)
    for _ in range(2):
        set_gradient(model, *_clipped(4.0))


@pytest.mark.parametrize("job", JOBS)
def test_a_job_writes_to_no_parameter_by_itself(job: str) -> None:
    model = nn.Linear(4, 3).to(DEVICE)
    JOBS[job](model)
    versions = [parameter._version for parameter in model.parameters()]
    JOBS[job](model)
    assert [parameter._version for parameter in model.parameters()] == versions


class _AddsOne(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data[(-1,) * self.weight.dim()] += 1
        return x * self.scale


KINDS = {
    "float64": torch.ones(3, 5, dtype=torch.float64),
    "of an odd length": torch.ones(5),
    "not contiguous": torch.ones(3, 4).T,
    "bfloat16": torch.ones(8, dtype=torch.bfloat16),
    "complex": torch.ones(4, dtype=torch.complex64),
    "whole numbers": torch.ones(3, dtype=torch.int8),
    "a single number": torch.ones(()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_number_of_any_kind_is_noticed(kind: str) -> None:
    with pytest.raises(ModelCallFailed, match="'weight'"):
        JOBS["set"](_AddsOne(KINDS[kind].clone()).to(DEVICE))
