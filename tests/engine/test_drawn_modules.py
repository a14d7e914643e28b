"""What the engine computes on models of random modules, against naive code."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, mixed_gradient, set_gradient, shard_stream
from gradbox_engine.errors import CoupledSamples
from gradbox_engine.per_sample import jacobian
from tests.device import on_cpu_alone
from tests.engine.drawn_modules import COUPLED, NUM_OUTPUTS, DrawnModules, drawn_shards
from tests.engine.per_sample import naive as rows
from tests.oracle import TOLERANCE, difference

pytestmark = on_cpu_alone  # where the naive code runs

Shards = list[dict[str, Tensor]]

MEETING = {"branch", "reached by some shards", "moving mean", "moving mean, bound anew"}
"""Parts in which samples see each other."""


def _loss(z: Tensor) -> Tensor:
    return z.sin().sum(0).square().sum() + z.pow(3).mean()


def _mode(seed: int) -> Any:
    return "train" if seed % 2 else "eval"


def _fresh(seed: int, **terms: Any) -> DrawnModules:
    return DrawnModules(seed, **terms).train(_mode(seed) == "train").requires_grad_()


def _naive(seed: int, shards: Shards) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradient and the buffers: a model for all forwards, one for each in turn."""
    model, zs = _fresh(seed), []
    for index, shard in enumerate(shards):
        with shard_stream(seed, 0, index):
            zs.append(model(**shard).detach())
    z = torch.cat(zs).requires_grad_()
    (cotangents,) = torch.autograd.grad(_loss(z), z)
    again = _fresh(seed)
    for index, cotangent in enumerate(cotangents.split([len(z) for z in zs])):
        with shard_stream(seed, 0, index):
            again(**shards[index]).backward(cotangent)
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        for name, p in again.named_parameters()
    }
    return grads, dict(model.named_buffers())


def _state(model: nn.Module) -> list[Any]:
    """Return what a job has to leave as it was: the model, the generators, the switches."""
    return [
        [(name, tensor.tolist()) for name, tensor in model.state_dict().items()],
        [(p.requires_grad, p.grad, len(p._backward_hooks or ())) for p in model.parameters()],
        [
            (name, sorted(vars(m)), m.training, getattr(m, "calls", 0), len(m._forward_hooks))
            for name, m in model.named_modules()
        ],
        [torch.get_rng_state().tolist(), random.getstate(), repr(numpy.random.get_state())],
        [torch.is_grad_enabled(), torch.get_default_dtype()],
    ]


@pytest.mark.parametrize("seed", range(45))
def test_the_gradient_and_the_buffers_are_those_of_naive_code(seed: int) -> None:
    shards, model = drawn_shards(seed, num_shards=2 + seed % 3), DrawnModules(seed)
    before = _state(model)
    found = set_gradient(
        model,
        [Group("z", shards)],
        Objective(_loss),
        mode=_mode(seed),
        seed=seed,
        retain=(0, 3000, 10**9)[seed // 2 % 3],
        returns=("grads", "buffers"),
    )
    assert _state(model) == before
    grads, buffers = _naive(seed, shards)
    assert difference(found.grads, grads) <= TOLERANCE, model.names
    assert found.buffers is not None
    assert found.buffers.keys() == buffers.keys()
    for name, buffer in buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_those_of_naive_code(seed: int) -> None:
    (shard,) = drawn_shards(seed, num_shards=1)
    model = _fresh(seed, without=COUPLED)
    with shard_stream(seed, 0, 0):
        z = model(**shard)
    expected = rows.flat(rows.rows(z, dict(model.named_parameters())))
    model = DrawnModules(seed, without=COUPLED)
    before = _state(model)
    try:
        found = jacobian(model, [shard], mode=_mode(seed), seed=seed)
    except CoupledSamples:
        assert MEETING & set(model.names)
        return
    finally:
        assert _state(model) == before
    assert rows.difference(rows.flat(found.arrays), expected) <= rows.TOLERANCE, model.names


@pytest.mark.parametrize("seed", range(20))
def test_mixed_gradients_are_those_of_double_backward(seed: int) -> None:
    shards = drawn_shards(seed, num_shards=2)
    y = torch.linspace(-1, 1, NUM_OUTPUTS, dtype=torch.float64).requires_grad_()

    def inner(y: Tensor, v: Tensor) -> Tensor:
        return (v**3 @ y.square()).sum() + (v @ y.sin()).square().sum()

    def outer(dfdz: Tensor) -> Tensor:
        return dfdz.square().sum().sin() + dfdz.pow(3).mean()

    model, dfdz = _fresh(seed).requires_grad_(False), []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for index, shard in enumerate(shards):
            x = shard["x"].clone().requires_grad_()
            with shard_stream(seed, 0, index):
                v = model(x.clone())
            dfdz += torch.autograd.grad(inner(y, v), x, create_graph=True)
    (expected,) = torch.autograd.grad(outer(torch.cat(dfdz)), y)
    model = DrawnModules(seed)
    before = _state(model)
    found = mixed_gradient(
        model,
        Group("z", shards),
        Objective(inner, {"y": y}, {"y": y}),
        Objective(outer),
        mode=_mode(seed),
        seed=seed,
    )
    assert _state(model) == before
    assert difference(found.grads, {"y": expected}) <= 100 * TOLERANCE, model.names
