"""Jobs at the edge of what is legal: the right gradient, or an error that says what to do."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradbox_engine import (
    BadInputs,
    BadOutput,
    BadPenalty,
    BadWeights,
    Group,
    Objective,
    Penalty,
    SetGradient,
    set_gradient,
)
from tests.oracle import TOLERANCE, difference

PLENTY = 10**9


def _shards(dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [{"0": torch.randn(3, 5, generator=generator, dtype=dtype)} for _ in range(4)]


def _spread(z: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(z, z).square()).mean()


def _job(model: nn.Module, loss=_spread, **terms) -> SetGradient:
    told = {"mode": "train"} | terms
    return set_gradient(model, [Group("z", _shards())], Objective(loss), **told)


def _naive(model: nn.Module, penalty=lambda model: 0.0) -> dict[str, Tensor]:
    loss = _spread(torch.cat([model(shard["0"]) for shard in _shards()])) + penalty(model)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


class _Prompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.arange(1.0, 6.0, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.values


class _Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prompt, self.linear = _Prompt(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.prompt())


def _square(tap: Tensor) -> Tensor:
    return tap.square().sum()


@pytest.mark.parametrize("retain", [0, PLENTY])
def test_a_penalty_on_a_parameter_counts_once_a_shard(retain):
    expected = _naive(_Prompted(), lambda model: 4 * 0.7 * _square(model.prompt()))
    result = _job(_Prompted(), penalties=[Penalty("prompt", _square, 0.7)], retain=retain)
    assert difference(result.grads, expected) <= TOLERANCE


class _Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)


class _Several(_Prompt):
    def forward(self) -> tuple[Tensor]:
        return (self.values,)


class _PromptedByOneOfSeveral(_Prompted):
    def __init__(self) -> None:
        super().__init__()
        self.prompt = _Several()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.prompt()[0])


def test_a_penalty_on_a_parameter_among_others_is_refused():
    with pytest.raises(BadPenalty, match="tap a submodule that returns it alone"):
        _job(_PromptedByOneOfSeveral(), penalties=[Penalty("prompt[0]", _square)])


def test_a_penalty_where_no_gradient_flows_is_refused():
    terms = {"penalties": [Penalty("second", _square)]}
    assert _job(_Checkpointed(reentrant=False), **terms).grads["first.weight"].abs().max() > 0
    with pytest.raises(BadPenalty, match="use_reentrant=False"):
        _job(_Checkpointed(reentrant=True), **terms)


def test_the_losss_parameters_need_names_of_their_own():
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    objective = Objective(lambda z: _spread(z * scale), parameters={"prompt.values": scale})
    with pytest.raises(BadInputs, match=r"prompt\.values"):
        set_gradient(_Prompted(), [Group("z", _shards())], objective)
    left_out = set_gradient(_Prompted(), [Group("z", _shards())], objective, wrt=["linear.*"])
    assert left_out.grads["prompt.values"].shape == ()


class _InSameMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
        self.second.weight.data = self.first.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("names", [["first.weight"], ["first.weight", "second.weight"]])
def test_weights_for_parameters_in_the_same_memory_are_refused(names):
    weights = dict.fromkeys(names, torch.eye(5, dtype=torch.float64))
    with pytest.raises(BadWeights, match=r"second\.weight"):
        _job(_InSameMemory(), weights=weights)


def test_weights_may_be_not_a_number():
    weight = torch.full((3, 5), torch.nan, dtype=torch.float64)
    result = _job(_Prompted(), lambda z: z.nan_to_num().sum(), weights={"linear.weight": weight})
    assert result.loss == 0


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0.1 * torch.randn_like(gradient)


class _Noisy(_Prompted):
    def forward(self, x: Tensor) -> Tensor:
        return _Noise.apply(nn.functional.dropout(super().forward(x), 0.3))


def test_noise_of_a_backward_pass_does_not_depend_on_what_is_kept():
    replayed, kept = _job(_Noisy(), retain=0), _job(_Noisy(), retain=PLENTY)
    assert all(torch.equal(kept.grads[name], grad) for name, grad in replayed.grads.items())


@pytest.mark.parametrize("factor", [1e-30, 1e-38, 1e-41, 0.0])
def test_fp16_bears_the_smallest_cotangents(factor):
    def job(precision):
        torch.manual_seed(0)
        model, shards = nn.Linear(5, 3), _shards(torch.float32)
        objective = Objective(lambda z: z.square().sum() * factor)
        return set_gradient(model, [Group("z", shards)], objective, precision=precision).grads

    assert difference(job("fp16"), job("fp32")) <= 0.05


def test_fp16_tries_no_other_scale_where_the_cotangents_themselves_are_infinite():
    model, calls = nn.Linear(5, 3), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    objective = Objective(lambda z: (z * 0).sqrt().sum())
    set_gradient(model, [Group("z", _shards(torch.float32))], objective, precision="fp16")
    assert len(calls) == 7  # all four, and the three whose graph was not kept


def test_fp16_bears_gradients_of_inputs_that_overflow_at_first():
    model = nn.Linear(5, 3).half()
    nn.init.constant_(model.weight, 3000.0)
    result = set_gradient(
        model, [Group("z", _shards(torch.float16))], Objective(torch.sum), wrt=["inputs.0"]
    )
    assert all(gradient.eq(9000).all() for gradient in result.input_grads["z"]["0"])


@dataclass
class _Found:
    z: Tensor
    secret: nn.Module


class _Revealing(_Prompted):
    def forward(self, x: Tensor) -> Tensor:
        return _Found(super().forward(x), self.linear)  # type: ignore[return-value]


def test_an_output_is_a_field_of_what_the_model_returned():
    assert _job(_Revealing(), output="z").loss == _job(_Prompted()).loss
    for path in ("__init__.__globals__.torch", "secret.forward.__func__", "z.data", "z.grad_fn"):
        with pytest.raises(BadOutput, match="expected"):
            _job(_Revealing(), output=path)
