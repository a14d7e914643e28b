"""The registered model after a job, and after a job that failed."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import EngineError, Group, ModelCallFailed, Objective, set_gradient
from tests import case_models
from tests.cases import CASES
from tests.device import DEVICE
from tests.engine.replay.running import answer


def _state(model: nn.Module) -> dict[str, Any]:
    """Everything a job could change, tensors by value."""
    state: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            state[f"{prefix}/{name}"] = _frozen(value)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        state[name] = (
            id(tensor),
            tensor.data_ptr(),
            tensor.detach().clone(),
            tensor.requires_grad,
            id(tensor.grad),
            None if tensor.grad is None else tensor.grad.clone(),
            len(tensor._backward_hooks or {}),
            len(tensor._post_accumulate_grad_hooks or {}),
        )
    return state


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor | nn.Module):
        return id(value)
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_frozen(item) for item in value]
    if isinstance(value, weakref.ref):  # another one to the same object is as good
        return "weakref", _frozen(value())
    return repr(value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple):
        return all(_same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def _assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = _state(model)
    assert after.keys() == before.keys()
    assert [name for name in before if not _same(before[name], after[name])] == []


def _worn(name: str) -> nn.Module:
    """A model that is not in its factory state: mixed flags, gradients, a hook of its own."""
    model = CASES[name]().model().to(DEVICE).train()
    for index, module in enumerate(model.modules()):
        module.training = index % 2 == 0
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    parameters[0].requires_grad_(False)
    parameters[-1].grad = torch.ones_like(parameters[-1])
    parameters[-1].register_hook(lambda gradient: gradient)
    next(model.modules()).register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("terms", [{}, {"precision": "fp64"}, {"retain": 10**9}])
def test_a_job_leaves_the_model_as_it_was(name, terms):
    model = _worn(name)
    before = _state(model)
    answer(CASES[name](), model, **terms)
    _assert_unchanged(model, before)


class _Failing(nn.Module):
    """Raises in its nth call of all, after it has advanced its statistics."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self.model = case_models.cnn()
        self.nth = nth
        self.calls = iter(range(1, 100))

    def forward(self, x: Tensor) -> Tensor:
        z = self.model(x)
        if next(self.calls) == self.nth:
            raise KeyError("weather")
        return z


@pytest.mark.parametrize("nth", [1, 3, 5, 7])
def test_a_failure_in_any_phase_leaves_the_model_as_it_was(nth):
    case = CASES["cnn in train"]()
    model = _Failing(nth).to(DEVICE).eval()
    before = _state(model)
    with pytest.raises(ModelCallFailed, match=r"group 'z', shard \d: the model raised KeyError"):
        answer(case, model)
    _assert_unchanged(model, before)


def test_a_failing_loss_leaves_the_model_as_it_was():
    model = case_models.cnn().to(DEVICE)
    before = _state(model)
    group = Group("z", CASES["cnn in train"]().groups["z"])
    with pytest.raises(ModelCallFailed, match="the loss raised"):
        set_gradient(model, [group], Objective(lambda z: z @ z))
    _assert_unchanged(model, before)


class _Stop(BaseException):
    pass


class _Stopping:
    def __init__(self, phase: str, done: int) -> None:
        self.at = (phase, done)

    def step(self, phase: str, done: int, total: int) -> None:
        if (phase, done) == self.at:
            raise _Stop


@pytest.mark.parametrize("at", [("forward", 2), ("cotangents", 1), ("replay", 2)])
def test_an_observer_that_stops_the_job_gets_through_and_leaves_the_model_as_it_was(at):
    model = case_models.cnn().to(DEVICE)
    before = _state(model)
    with pytest.raises(_Stop):
        answer(CASES["cnn in train"](), model, observer=_Stopping(*at))
    _assert_unchanged(model, before)


def test_an_observer_sees_every_shard_of_both_passes():
    steps = []

    class Recording:
        def step(self, phase: str, done: int, total: int) -> None:
            steps.append((phase, done, total))

    answer(CASES["mlp"](), observer=Recording())
    assert steps == [
        *(("forward", i, 4) for i in range(5)),
        ("cotangents", 0, 1),
        ("cotangents", 1, 1),
        *(("replay", i, 4) for i in range(5)),
    ]


def test_global_switches_are_as_they_were():
    torch.backends.mha.set_fastpath_enabled(True)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    answer(CASES["transformer"](), precision="fp64")
    assert torch.equal(torch.rand(3), expected)
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.is_grad_enabled()


class _WritesToItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.linear(x)


def test_what_was_handed_in_is_not_written_to():
    shards = [{"x": torch.ones(2, 5, dtype=torch.float64)} for _ in range(3)]
    result = set_gradient(_WritesToItsInput(), [Group("z", shards)], Objective(torch.sum))
    assert all(bool(shard["x"].eq(1).all()) for shard in shards)
    assert result.grads["linear.weight"].eq(12).all()


class _Hooking(nn.Module):
    """Registers a hook of each kind with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3).double()
        self.linear.bias.register_hook(lambda gradient: gradient)

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.linear.parameters():
            parameter.register_hook(lambda gradient: gradient)
            parameter.register_post_accumulate_grad_hook(lambda _: None)
        return self.linear(x)


def test_hooks_that_a_refused_call_registered_are_gone():
    model = _Hooking()
    own = dict(model.linear.bias._backward_hooks)
    shards = [{"0": torch.ones(2, 5, dtype=torch.float64)} for _ in range(3)]
    with pytest.raises(ModelCallFailed, match="expected its hooks to stay"):
        set_gradient(model, [Group("z", shards)], Objective(torch.sum))
    assert dict(model.linear.bias._backward_hooks) == own
    assert not model.linear.weight._backward_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_what_the_loss_holds_is_widened_for_the_job_alone():
    scale = torch.full((), 2.0)
    seen = []

    def loss(z: Tensor, shift: Tensor, power: float) -> Tensor:
        seen.append((z.dtype, shift.dtype, scale.dtype, power))
        return ((z + shift) * scale).square().sum()

    shards = [{"0": torch.ones(2, 5)} for _ in range(3)]
    objective = Objective(loss, {"shift": torch.ones(3), "power": 1.5}, {"loss.scale": scale})
    found = set_gradient(nn.Linear(5, 3), [Group("z", shards)], objective, precision="fp64")
    assert seen == [(torch.float64, torch.float64, torch.float64, 1.5)]
    assert found.grads["loss.scale"].dtype == torch.float64
    assert (scale.dtype, scale.requires_grad) == (torch.float32, False)


def test_tensors_within_an_argument_are_not_written_to_either():
    class Nested(_WritesToItsInput):
        def forward(self, x):
            return super().forward(x["inner"][0])

    shards = [{"x": {"inner": [torch.ones(2, 5)]}} for _ in range(3)]
    groups = [Group("z", shards)]
    result = set_gradient(Nested().float(), groups, Objective(torch.sum), precision="fp64")
    assert all(bool(shard["x"]["inner"][0].eq(1).all()) for shard in shards)
    assert result.grads["linear.weight"].eq(12).all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_job_runs_where_grad_is_disabled(mode):
    case = CASES["mlp"]()
    model = case.model()
    with mode():
        result = answer(case, model)
    assert all(bool(gradient.ne(0).any()) for gradient in result.grads.values())


class _Settled(dict[str, int]):
    """A dict that cannot be changed, as other libraries keep their settings in."""

    def _refuse(self, *_):
        raise TypeError("settled")

    __setitem__ = __delitem__ = clear = update = pop = _refuse


def test_a_dict_that_refuses_changes_is_left_alone():
    model = nn.Linear(2, 2)
    model.settings = settings = _Settled(width=2)
    set_gradient(model, [Group("z", [{"0": torch.ones(3, 2)}])], Objective(torch.sum))
    assert model.settings is settings
    assert settings == {"width": 2}


def test_errors_are_one_tree():
    with pytest.raises(EngineError):
        answer(CASES["mlp"](), wrt=["nothing"])
