"""Models whose gradients, and not their outputs, depend on what lies inside their attributes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import (
    CoupledShards,
    FirstOutputs,
    Objective,
    gradient_at_cotangents,
    mixed_gradient,
    set_gradient,
    set_outputs,
)
from gradbox_engine.per_sample import jacobian
from tests.device import same_bits
from tests.engine.interrupted import Kept, Killed, KilledAt
from tests.engine.per_sample import naive as rows
from tests.engine.ranges.running import even, set_gradient_in_ranges
from tests.engine.replay.inside_attributes import KEPT, KINDS
from tests.engine.replay.reversing import groups, loss, loss_of_some, naive_gradients
from tests.oracle import TOLERANCE, difference


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retain", [0, 1000, 10**9])
@pytest.mark.parametrize("of", [loss, loss_of_some])
def test_a_replay_finds_what_the_first_pass_found_and_so_does_the_next_job(kind, retain, of):
    model, expected = kind(), naive_gradients(kind, of)
    for _ in range(2):
        found = set_gradient(model, groups(), Objective(of), mode="train", retain=retain)
        assert difference(found.grads, expected) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retain", [0, 1000, 10**9])
def test_the_second_half_does_in_another_job(kind, retain):
    model = kind()
    first = set_outputs(model, groups(), mode="train", retain=retain)
    z = first.outputs["z"]
    assert isinstance(z, Tensor)
    z = z.clone().requires_grad_()
    (cotangent,) = torch.autograd.grad(loss(z), z)
    given = first.kept or FirstOutputs({"z": {"": z.detach()}}, first.rows, first.stateful)
    found = gradient_at_cotangents(model, groups(), {"z": {"": cotangent}}, given, mode="train")
    assert difference(found.grads, naive_gradients(kind)) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_first_call(kind):
    shard = groups()[0].shards[1]
    expected = rows.flat(rows.jacobian(kind().train(), shard))
    model = kind()
    for _ in range(2):
        found = jacobian(model, [shard], mode="train")
        assert rows.difference(rows.flat(found.arrays), expected) <= rows.TOLERANCE


@pytest.mark.parametrize("kind", KEPT)
def test_the_tangent_pass_of_a_mixed_gradient_finds_it(kind):
    def naive(model: nn.Module, y: Tensor) -> Tensor:
        xs = [shard["x"].clone().requires_grad_() for shard in groups()[0].shards]
        dfdz = [torch.autograd.grad((model(x) ** 2 @ y).sum(), x, create_graph=True)[0] for x in xs]
        (gradient,) = torch.autograd.grad(torch.cat(dfdz).pow(2).sum(), y)
        return gradient

    y = torch.linspace(-1, 1, 3, dtype=torch.float64).requires_grad_()
    result = mixed_gradient(
        kind(),
        groups()[0],
        Objective(lambda y, v: (v**2 @ y).sum(), {"y": y}, {"y": y}),
        Objective(lambda dfdz: dfdz.pow(2).sum()),
        mode="train",
    )
    assert difference(result.grads, {"y": naive(kind().train(), y)}) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_shards_that_change_it_are_not_split(kind):
    shards = groups()
    with pytest.raises(CoupledShards, match=r"attribute 'kept|classes|objects that hold"):
        set_gradient_in_ranges(kind(), even(shards, 2), shards, Objective(loss), mode="train")


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_job_goes_on_or_begins_again(kind):
    how: Any = {"mode": "train", "retain": 0, "checkpoints": Kept()}
    expected = set_gradient(kind(), groups(), Objective(loss), mode="train", retain=0)
    with pytest.raises(Killed):
        set_gradient(kind(), groups(), Objective(loss), observer=KilledAt("replay", 3), **how)
    found = set_gradient(kind(), groups(), Objective(loss), **how)
    assert all(same_bits(found.grads[name], grad) for name, grad in expected.grads.items())
