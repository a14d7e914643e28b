"""A run's state against torch.optim on the same gradients, and through a file and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.errors import BadOptimizer, BadWeights, GradientNotFinite
from gradbox_engine.optimize import OptimizerChoice, ParameterGroup, TrainingState
from gradbox_engine.optimize.optimizers import CLASSES, available

# By name: options that are not the defaults.
OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "adafactor": {"lr": 0.02, "weight_decay": 0.01},
    "adagrad": {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1},
    "adam": {"lr": 0.01, "betas": [0.8, 0.95], "amsgrad": True},
    "adamax": {"lr": 0.02},
    "adamw": {"lr": 0.01, "weight_decay": 0.1},
    "muon": {"lr": 0.02, "momentum": 0.9},
    "nadam": {"lr": 0.01, "momentum_decay": 0.01},
    "radam": {"lr": 0.01, "weight_decay": 0.05},
    "rmsprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "sgd": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
}
STEPS: Final = 30


def model() -> nn.Module:
    """Return matrices alone, which every optimizer takes."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)
    return nn.Sequential(*layers).double()


def named(of: nn.Module) -> dict[str, Tensor]:
    return dict(of.named_parameters())


def loss(of: nn.Module, step: int) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    out: Tensor = of(x.to(next(of.parameters()).dtype))
    return (out.square() + out).mean()


def grads_at(state: TrainingState, of: nn.Module, step: int) -> dict[str, Tensor]:
    """Return the gradients of a step at the state's weights."""
    own = copy.deepcopy(of)
    own.load_state_dict(dict(state.weights), strict=False)
    torch.autograd.backward(loss(own, step))
    return {n: p.grad.detach() for n, p in own.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", available())
def test_thirty_steps_are_those_of_torch(name: str) -> None:
    plain = model()
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in OPTIONS[name].items()}
    kind: Any = getattr(torch.optim, CLASSES[name])
    optimizer = kind(plain.parameters(), **options)
    state = TrainingState(named(model()), OptimizerChoice(name, OPTIONS[name]))
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(loss(plain, step))
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = rate = 0.01 / (step + 1)
        optimizer.step()
        updated = state.step(grads_at(state, model(), step), lr=rate, clip_norm=0.5)
        assert updated.grad_norm == pytest.approx(float(norm), rel=1e-12)
    assert (updated.step, state.num_steps) == (STEPS, STEPS)
    for key, parameter in plain.named_parameters():
        # Muon's iteration runs in bfloat16, where the last bit of an input moves many.
        tolerance = 1e-2 if name == "muon" else 1e-12
        torch.testing.assert_close(state.weights[key], parameter.detach(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", available())
def test_a_state_goes_on_from_a_file_with_the_same_bits(name: str) -> None:
    choice = OptimizerChoice(name, OPTIONS[name])
    state = TrainingState(named(model()), choice)
    for step in range(3):
        state.step(grads_at(state, model(), step), lr=0.03)
    kept = {key: tensor.clone() for key, tensor in state.tensors().items()}
    facts = copy.deepcopy(state.facts())
    again = TrainingState(named(model()), choice)
    again.restore(kept, facts)
    for step in range(3, 6):
        for one in (state, again):
            one.step(grads_at(one, model(), step))
    assert again.num_steps == 6
    assert again.facts() == state.facts()
    for key, tensor in state.tensors().items():
        assert torch.equal(again.tensors()[key], tensor), key


def test_weights_alone_begin_a_new_run() -> None:
    choice = OptimizerChoice("adam", {"lr": 0.1})
    state = TrainingState(named(model()), choice)
    state.step(grads_at(state, model(), 0))
    again = TrainingState(named(model()), choice)
    again.restore(state.tensors(), state.facts(), with_moments=False)
    assert again.num_steps == 0
    assert torch.equal(again.weights["0.weight"], state.weights["0.weight"])
    assert not [name for name in again.tensors() if name.startswith("moments/")]


def test_groups_have_options_and_rates_of_their_own() -> None:
    groups = [ParameterGroup(["2.*"], {"lr": 0.5, "weight_decay": 0.0})]
    choice = OptimizerChoice("sgd", {"lr": 0.1, "weight_decay": 0.1}, groups)
    state = TrainingState(named(model()), choice)
    grads = grads_at(state, model(), 0)
    state.step({n: g.clone() for n, g in grads.items()})
    first, last = model()[0].weight.detach(), model()[2].weight.detach()  # type: ignore[index]
    torch.testing.assert_close(state.weights["2.weight"], last - 0.5 * grads["2.weight"])
    decayed = first - 0.1 * (grads["0.weight"] + 0.1 * first)
    torch.testing.assert_close(state.weights["0.weight"], decayed)
    state.step({n: torch.zeros_like(g) for n, g in grads.items()}, lr=[0.0, 1.0])
    torch.testing.assert_close(state.weights["0.weight"], 0.9 * decayed)
    with pytest.raises(BadOptimizer, match="expected a number, or 2 of them"):
        state.step(grads, lr=[0.1])


def test_a_group_names_modules_and_the_first_that_names_a_parameter_has_it() -> None:
    groups = [ParameterGroup(["2"], {"lr": 0.5}), ParameterGroup(["*"], {"lr": 0.2})]
    state = TrainingState(named(model()), OptimizerChoice("sgd", {"lr": 0.1}, groups))
    before = {name: weight.clone() for name, weight in state.weights.items()}
    state.step({name: torch.ones_like(weight) for name, weight in before.items()})
    moved = {name: float((before[name] - w).mean()) for name, w in state.weights.items()}
    assert {name: pytest.approx(0.5 if name[0] == "2" else 0.2) for name in before} == moved


def test_a_group_without_a_parameter_is_named() -> None:
    groups = [ParameterGroup(["*.weights"], {}), ParameterGroup(["loss.scale"], {})]
    state = TrainingState(named(model()), OptimizerChoice("sgd", {"lr": 0.1}, groups))
    with pytest.raises(BadOptimizer, match=r"got '\*.weights'.*did you mean '\d.weight'"):
        state.check_groups(["loss.scale"])
    groups = groups[1:]
    state = TrainingState(named(model()), OptimizerChoice("sgd", {"lr": 0.1}, groups))
    state.check_groups(["loss.scale"])
    with pytest.raises(BadOptimizer, match=r"got 'loss.scale'"):
        state.check_groups([])


def test_bfloat16_has_a_master_that_takes_small_updates() -> None:
    narrow = {"w": torch.ones(4, dtype=torch.bfloat16)}
    state = TrainingState(narrow, OptimizerChoice("sgd", {"lr": 1.0}))
    for _ in range(100):
        state.step({"w": torch.full((4,), 1e-3)})
    assert state.weights["w"].dtype == torch.bfloat16
    torch.testing.assert_close(state.weights["w"].float(), torch.full((4,), 0.9), rtol=0, atol=4e-3)
    assert state.tensors()["weights/w"].dtype == torch.float32
    assert torch.equal(narrow["w"], torch.ones(4, dtype=torch.bfloat16))


def test_what_the_loss_does_not_reach_stays() -> None:
    state = TrainingState(named(model()), OptimizerChoice("adamw", {"weight_decay": 0.5}))
    grads = {name: torch.zeros_like(p) for name, p in model().named_parameters()}
    state.step(grads, unreached=["0.weight"])
    before = model().state_dict()
    assert torch.equal(state.weights["0.weight"], before["0.weight"])
    assert not torch.equal(state.weights["2.weight"], before["2.weight"])


@pytest.mark.parametrize("name", ["adagrad", "adamw", "sgd"])
def test_parameters_of_a_loss_join_when_they_come(name: str) -> None:
    state = TrainingState(named(model()), OptimizerChoice(name, OPTIONS[name]))
    state.step(grads_at(state, model(), 0))
    before = {key: tensor.clone() for key, tensor in state.tensors().items()}
    state.adopt({"loss_inputs.scale": torch.tensor(2.0, dtype=torch.float64)})
    after = state.tensors()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    grads = grads_at(state, model(), 1)
    state.step(grads | {"loss_inputs.scale": torch.tensor(1.0, dtype=torch.float64)})
    assert state.weights["loss_inputs.scale"] < 2.0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    state = TrainingState(named(model()), OptimizerChoice("adam", {}))
    state.step(grads_at(state, model(), 0))
    before = {key: tensor.clone() for key, tensor in state.tensors().items()}
    grads = grads_at(state, model(), 1)
    grads["2.weight"][0, 0] = bad
    with pytest.raises(GradientNotFinite, match=r"in 2\.weight: the run is unchanged, at step 1"):
        state.step(grads, lr=0.7)
    assert all(torch.equal(state.tensors()[key], tensor) for key, tensor in before.items())
    assert (state.num_steps, state.facts()["lr"]) == (1, [1e-3])


def test_moving_there_and_back_changes_no_bit() -> None:
    state = TrainingState(named(model()), OptimizerChoice("nadam", {}))
    state.step(grads_at(state, model(), 0))
    before = {key: tensor.clone() for key, tensor in state.tensors().items()}
    assert state.num_bytes >= 3 * 42 * 8
    state.move(torch.device("cpu"))
    state.step(grads_at(state, model(), 1))
    assert state.tensors().keys() == before.keys()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (OptimizerChoice("lion", {}), "expected one of .*, got 'lion'"),
        (OptimizerChoice("sgd", {"betas": [0.9, 0.99]}), "expected options out of .*, got betas"),
        (OptimizerChoice("adam", {"fused": True}), "got fused"),
        (OptimizerChoice("adam", {"lr": -1.0}), "torch refuses it: Invalid learning rate"),
        (OptimizerChoice("adam", {}, [ParameterGroup(["*"], {"nesterov": True})]), "got nesterov"),
    ],
)
def test_what_torch_does_not_have_is_refused(choice: OptimizerChoice, message: str) -> None:
    with pytest.raises(BadOptimizer, match=message):
        TrainingState(named(model()), choice)


def test_gradients_must_fit() -> None:
    state = TrainingState(named(model()), OptimizerChoice("sgd", {}))
    with pytest.raises(BadWeights, match=r"expected numbers of shape \(6, 4\) for '0.weight', got"):
        state.step({"0.weight": torch.zeros(1)})
