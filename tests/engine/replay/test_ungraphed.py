"""A first pass without graphs: only where it gives the same bits, and it never costs a gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, SetGradient, set_gradient
from gradbox_engine.errors import GraphInBuffer, ModelCallFailed
from gradbox_engine.replay import ungraphed
from gradbox_engine.replay.ungraphed import WORTHWHILE
from tests.cases import CASES
from tests.engine.replay.running import answer
from tests.oracle import TOLERANCE, difference, naive

NUM_SHARDS = WORTHWHILE + 2
PLENTY = 10**9


def _shards(num_shards: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {"0": torch.randn(3, 5, generator=generator, dtype=torch.float64)}
        for _ in range(num_shards)
    ]


def _spread(z: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(z, z).square()).mean()


def _job(model: nn.Module, num_shards: int = NUM_SHARDS, **terms) -> SetGradient:
    told = {"mode": "train", "returns": ("grads", "buffers")} | terms
    return set_gradient(model, [Group("z", _shards(num_shards))], Objective(_spread), **told)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _watch(model: _Model, **terms) -> tuple[SetGradient, list[bool]]:
    """Return a job's result, and for each call of the model whether there was to be a graph."""
    noted: list[bool] = []
    handle = model.register_forward_pre_hook(lambda *_: noted.append(torch.is_grad_enabled()))
    result = _job(model, **terms)
    handle.remove()
    return result, noted


def _same(a: SetGradient, b: SetGradient) -> bool:
    return a.loss == b.loss and all(
        torch.equal(left[name], right[name])
        for left, right in ((a.grads, b.grads), (a.buffers, b.buffers))
        for name in right
    )


@pytest.mark.parametrize("name", CASES)
def test_no_bit_of_a_result_depends_on_it(name, monkeypatch):
    monkeypatch.setattr(ungraphed, "WORTHWHILE", 1)
    case = CASES[name]()
    case = replace(
        case,
        groups={group: shards * 2 for group, shards in case.groups.items()},
        loss_inputs={n: torch.cat([v, v]) if v.ndim else v for n, v in case.loss_inputs.items()},
    )
    expected = answer(case, retain=PLENTY)
    model = case.model()
    for retain in (0, 0, 5000, 20000):
        assert _same(answer(case, model, retain=retain), expected)
    assert difference(expected.grads, naive(case).grads) <= TOLERANCE


def test_what_one_job_has_tried_later_jobs_do():
    model = _Model()
    expected = _job(_Model(), retain=PLENTY)
    first, graphs = _watch(model)
    assert graphs == [True, False, *[True] * (NUM_SHARDS - 1), *[True] * (NUM_SHARDS - 1)]
    second, graphs = _watch(model)
    assert graphs == [*[False] * (NUM_SHARDS - 1), True, *[True] * (NUM_SHARDS - 1)]
    assert _same(first, expected)
    assert _same(second, expected)


def test_what_is_known_holds_for_one_setting_alone():
    model = _Model()
    _watch(model)
    for terms in ({"wrt": ["body.0.*"]}, {"precision": "fp64"}, {"mode": "eval"}):
        _, graphs = _watch(model, **terms)
        assert graphs[:3] == [True, False, True]


def test_shards_that_are_kept_have_graphs():
    model = _Model()
    _watch(model)
    _, graphs = _watch(model, retain=PLENTY)
    assert all(graphs)


def test_few_shards_are_worth_a_trial_when_they_come_again():
    model = _Model()
    _, graphs = _watch(model, num_shards=3)
    assert all(graphs)
    _, graphs = _watch(model, num_shards=3)
    assert graphs == [False, *[True] * 3, *[True] * 2]
    _, graphs = _watch(model, num_shards=3)
    assert graphs == [False, False, True, *[True] * 2]


class _Otherwise(_Model):
    """Rounds otherwise without a graph; `honest` hides it."""

    honest = False

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        return z if self.honest or torch.is_grad_enabled() else z * (1 + 1e-15)


class _Refusing(_Model):
    """Fails without a graph, unless it is honest."""

    honest = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.honest and not torch.is_grad_enabled():
            raise RuntimeError("expected a graph")
        return self.body(x)


@pytest.mark.parametrize("kind", [_Otherwise, _Refusing])
def test_what_turns_out_wrong_is_done_again_with_graphs(kind):
    model = kind()
    expected = _job(kind(), retain=PLENTY)
    model.honest = True
    _watch(model)
    model.honest = False
    result, graphs = _watch(model)
    assert not all(graphs)
    assert _same(result, expected)
    result, graphs = _watch(model)
    assert all(graphs)
    assert _same(result, expected)


class _Otherbuffers(_Model):
    """Without a graph z is the same, and the statistics are not."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        if not torch.is_grad_enabled():
            self.body[1].running_mean.mul_(1 + 1e-15)
        return z


@pytest.mark.parametrize("kind", [_Otherwise, _Otherbuffers])
def test_a_model_that_is_not_the_same_without_a_graph_always_has_one(kind):
    model = kind()
    expected = _job(kind(), retain=PLENTY)
    for _ in range(2):
        result, _ = _watch(model)
        assert _same(result, expected)
    _, graphs = _watch(model)
    assert all(graphs)


class _Inner(_Model):
    """Differentiates in its own forward pass, without asking whether it may."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = torch.tanh(self.body[0](x)).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


def test_a_model_that_needs_a_graph_has_one():
    model, expected = _Inner(), _job(_Inner(), retain=PLENTY)
    for _ in range(2):
        assert _same(_job(model), expected)


class _Caching(_Model):
    """Computes something of its weight in its first call and uses it ever after."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = self.body[0].weight.norm()
        return self.body(x) * self.scale


def test_a_tensor_kept_with_its_graph_is_an_error_and_never_a_missing_gradient():
    model = _Caching()
    for _ in range(3):
        with pytest.raises(ModelCallFailed):
            _job(model)


class _Fusing(_Model):
    """Fuses weights in its first call, by an operation that saves nothing for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4, 3).double()
        self.third = nn.Linear(4, 2).double()
        self.fused: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fused is None:
            self.fused = torch.cat([self.second.weight, self.third.weight])
        return nn.functional.linear(self.body(x), self.fused).tanh()


class _FusingInADict(_Fusing):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.fused = self.cache.get("fused")
        z = super().forward(x)
        assert self.fused is not None
        self.cache["fused"], self.fused = self.fused, None
        return z


@pytest.mark.parametrize("kind", [_Fusing, _FusingInADict])
@pytest.mark.parametrize("num_shards", [3, NUM_SHARDS])
def test_what_a_model_keeps_from_call_to_call_keeps_its_graph(kind, num_shards):
    expected = _job(kind(), num_shards, retain=PLENTY)
    assert expected.grads["second.weight"].abs().max() > 1e-4
    model = kind()
    for _ in range(4):
        assert _same(_job(model, num_shards), expected)


def test_a_model_that_keeps_something_has_graphs_ever_after():
    model = _Fusing()
    for _ in range(2):
        _watch(model, num_shards=3)
    _, graphs = _watch(model, num_shards=3)
    assert all(graphs)


class _Remembering(_Model):
    """Leaves its mean in a buffer, with its graph where the first entry is large."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x) + self.memory
        self.memory = z.mean(0) if x[0, 0] > 1 else z.mean(0).detach()
        return z


def test_a_graph_in_a_buffer_is_refused_in_later_jobs_too():
    shards = _shards(3)
    for shard in shards:
        shard["0"][0, 0] = 0
    model = _Remembering()
    harmless = [Group("z", shards)]
    for _ in range(2):
        set_gradient(model, harmless, Objective(_spread), mode="train")
    shards[0]["0"][0, 0] = 2
    with pytest.raises(GraphInBuffer, match="memory"):
        set_gradient(model, harmless, Objective(_spread), mode="train")


class _OfAnotherForm(_Model):
    """Returns z alone where there is a graph, and a pair without."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        return z if torch.is_grad_enabled() else (z, None)  # type: ignore[return-value]


def test_a_model_that_returns_something_else_without_a_graph_is_given_one():
    model = _OfAnotherForm()
    results = [_job(model, 3) for _ in range(3)]
    assert all(_same(result, results[0]) for result in results)
