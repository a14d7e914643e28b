"""Steps of a run against a plain loop: forward, loss, backward, optimizer, on one copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradbox.protocol import GraphLoss, OptimizerSpec, TensorRef, TracedFunction, step_seed
from gradbox.protocol.spec_fields import FunctionTensor
from gradbox.tracing.trace import trace
from gradbox_engine import shard_stream
from gradbox_engine.optimize.optimizers import CLASSES, available
from gradbox_worker.exceptions_to_problems import Caught
from gradbox_worker.work import Finished
from tests.engine.optimize.test_training_state import OPTIONS
from tests.worker.box import sum_of_squares
from tests.worker.runs import zoo
from tests.worker.runs.device import Device, shards_at

STEPS = 30
SEED = 7


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


def plain_forward(model: nn.Module, step: int, shards: Any) -> Tensor:
    """Return Z of a step, with the masks that the box draws."""
    zs = []
    for place, shard in enumerate(shards):
        with shard_stream(step_seed(SEED, step), group=0, shard=place):
            zs.append(model(shard["0"]))
    return torch.cat(zs)


def loss_of(z: Tensor) -> Tensor:
    return (z.square() + z).mean()


def assert_trained_alike(device: Device, run: str, model: nn.Module, tolerance: float) -> None:
    held = device.state(run)
    for name, parameter in model.named_parameters():
        found = held[f"weights/{name}"]
        torch.testing.assert_close(found, parameter.detach(), rtol=0, atol=tolerance)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(held[f"buffers/{name}"], buffer, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", available())
def test_thirty_steps_are_those_of_a_plain_loop(device: Device, name: str) -> None:
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in OPTIONS[name].items()}
    plain = zoo.matrices().train()
    kind: Any = getattr(torch.optim, CLASSES[name])
    optimizer = kind(plain.parameters(), **options)
    run = device.begin(
        "matrices", optimizer=OptimizerSpec(name=name, options=dict(OPTIONS[name])), seed=SEED
    )
    for step in range(1, STEPS + 1):
        shards, rate = shards_at(step), 0.02 / step
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = loss_of(plain_forward(plain, step, shards))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        receipt, tensors = device.step(run, shards, loss=loss_of, lr=rate, clip_norm=0.1)
        assert receipt.loss == pytest.approx(loss.item(), rel=1e-10)
        assert receipt.grad_norm == pytest.approx(float(norm), rel=1e-10)
        assert (receipt.run, receipt.step, receipt.lr) == (run, step, [rate])
        assert not tensors
    # Muon's iteration runs in bfloat16, where the last bit of an input moves many.
    assert_trained_alike(device, run, plain, 1e-2 if name == "muon" else 1e-12)


def test_dropout_batch_norm_and_biases(device: Device) -> None:
    plain = zoo.double().train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    run = device.begin(optimizer=OptimizerSpec(name="adamw", options={"lr": 0.01}), seed=SEED)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss_of(plain_forward(plain, step, shards_at(step))).backward()
        optimizer.step()
        device.step(run, shards_at(step), loss=loss_of, retain=0 if step % 2 else "auto")
    assert_trained_alike(device, run, plain, 1e-12)


def test_what_the_loss_trains_belongs_to_the_run(device: Device) -> None:
    class Projected(nn.Module):
        """A projector with batch norm, as Barlow Twins has one."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layer = nn.Linear(3, 4, bias=False).double()
            self.norm = nn.BatchNorm1d(4).double()

        def forward(self, z: Tensor, log_scale: Tensor) -> Tensor:
            scores = self.norm(self.layer(z)) * log_scale.exp()
            return F.cross_entropy(scores, torch.arange(12) % 4)

    plain, projected = zoo.double().train(), Projected()
    log_scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    trained = [*plain.parameters(), *projected.parameters(), log_scale]
    # Not Adam: the bias before the projector's batch norm has no gradient, only rounding.
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    options = {"lr": 0.05, "momentum": 0.9}
    blob = device.box.upload({"s": log_scale.detach()})
    inputs = {"log_scale": TensorRef(blob=blob, tensor="s", requires_grad=True)}
    run = device.begin(optimizer=OptimizerSpec(name="sgd", options=options), seed=SEED)
    loss = traced_module(device, Projected())
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        expected = projected(plain_forward(plain, step, shards_at(step)), log_scale)
        expected.backward()
        optimizer.step()
        receipt, _ = device.step(run, shards_at(step), loss=loss, loss_inputs=inputs)
        assert receipt.loss == pytest.approx(expected.item(), rel=1e-10)
        if step == STEPS // 2:
            device.states.close()
    assert_trained_alike(device, run, plain, 1e-12)
    held = device.state(run)
    for name, parameter in projected.named_parameters():
        found = held[f"weights/loss.{name}"]
        torch.testing.assert_close(found, parameter.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        held["weights/loss_inputs.log_scale"], log_scale.detach(), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        held["buffers/loss/norm.running_mean"], projected.norm.running_mean, rtol=0, atol=1e-12
    )


def test_a_gradient_that_is_asked_for_is_as_it_was_computed(device: Device) -> None:
    run = device.begin(optimizer=OptimizerSpec(name="sgd", options={"lr": 1.0}))
    before = device.state(run)
    receipt, tensors = device.step(
        run, shards_at(1), returns=["grads"], clip_value=0.5, clip_norm=1e-3
    )
    grads = {n.removeprefix("grads/"): g for n, g in tensors.items() if n.startswith("grads/")}
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    assert float(norm) > 1
    after = device.state(run)
    moved = [after[f"weights/{n}"] - before[f"weights/{n}"] for n in grads]
    assert float(torch.stack([m.norm() for m in moved]).norm()) == pytest.approx(1e-3)
    # Before it was cut to 0.5, too.
    assert receipt.grad_norm is not None
    assert max(float(g.abs().max()) for g in grads.values()) > 0.5


def test_weights_in_16_bits_have_masters(device: Device) -> None:
    run = device.begin("half", optimizer=OptimizerSpec(name="sgd", options={"lr": 1e-4}))
    for step in range(1, 6):
        device.step(run, shards_at(step, dtype=torch.bfloat16))
    held = device.state(run)
    assert held["weights/0.weight"].dtype == torch.float32
    registered = device.registry.get("half").module.get_parameter("0.weight")
    master, rounded = held["weights/0.weight"], held["weights/0.weight"].bfloat16()
    assert not torch.equal(master, registered.float())
    assert not torch.equal(master, rounded.float())


def test_groups_and_patterns(device: Device) -> None:
    groups = [{"wrt": ["4.*"], "options": {"lr": 0.5}}]
    spec = OptimizerSpec.model_validate({"name": "sgd", "options": {"lr": 0.1}, "groups": groups})
    run = device.begin(optimizer=spec, wrt=["0.weight", "4"])
    before = device.state(run)
    receipt, tensors = device.step(run, shards_at(1), returns=["grads"])
    after = device.state(run)
    assert receipt.lr == [0.5, 0.1]
    assert receipt.names == ("0.weight", "4.weight", "4.bias")
    assert device.step(run, shards_at(2))[0].names == ()  # no gradients come back
    assert {n for n in after if n.startswith("weights/")} == {
        "weights/0.weight",
        "weights/4.weight",
        "weights/4.bias",
    }
    for name, rate in (("0.weight", 0.1), ("4.bias", 0.5)):
        expected = before[f"weights/{name}"] - rate * tensors[f"grads/{name}"]
        torch.testing.assert_close(after[f"weights/{name}"], expected)


def test_a_group_that_names_nothing_is_refused_in_the_first_step(device: Device) -> None:
    groups = [{"wrt": ["*.biass"], "options": {"lr": 0.5}}]
    spec = OptimizerSpec.model_validate({"name": "sgd", "groups": groups})
    run = device.begin(optimizer=spec)
    _, answer = device.run(device.spec(run, shards_at(1)))
    assert isinstance(answer, Caught)
    assert "got '*.biass', which matches none of 5; did you mean" in answer.problem.detail
    assert device.book.runs[run].num_steps == 0


def test_the_registered_model_stays_as_it_is(device: Device) -> None:
    registered = device.registry.get("double").module
    before = {name: tensor.clone() for name, tensor in registered.state_dict().items()}
    run = device.begin()
    for step in range(1, 4):
        device.step(run, shards_at(step), loss=sum_of_squares)
    after = registered.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def traced_module(device: Device, module: nn.Module) -> Any:
    """Return a module as a job's loss, its tensors uploaded."""
    made = trace(module, positional=1, arguments=["log_scale"])
    blob = device.box.upload({n: t.detach() for n, t in made.tensors.items()})
    trained = dict(module.named_parameters())
    refs = {
        name: FunctionTensor(
            blob=blob, tensor=name, requires_grad=name in trained, buffer=name not in trained
        )
        for name in made.tensors
    }
    return GraphLoss(function=TracedFunction(graph=made.graph, tensors=refs))


def test_what_a_loss_brings_keeps_its_shape(device: Device) -> None:
    def scaled(z: Tensor, scale: Tensor) -> Tensor:
        return (z * scale).sum()

    made = trace(scaled, positional=1, arguments=["scale"])
    run = device.begin()
    for shape in ((3,), (1,)):
        blob = device.box.upload({"s": torch.ones(shape, dtype=torch.float64)})
        inputs = {"scale": TensorRef(blob=blob, tensor="s", requires_grad=True)}
        loss = GraphLoss(function=TracedFunction(graph=made.graph))
        _, answer = device.run(device.spec(run, shards_at(1), loss=loss, loss_inputs=inputs))
        assert isinstance(answer, Finished) == (shape == (3,))
    assert isinstance(answer, Caught)
    assert "scale: expected the shape (3,) that the run has trained" in answer.problem.detail
