"""Models that change in each call: every entry point finds what the first pass found."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import (
    CoupledShards,
    Group,
    Objective,
    gradient_at_cotangents,
    mixed_gradient,
    set_gradient,
    set_outputs,
)
from gradbox_engine.per_sample import CoupledSamples, jacobian
from tests.device import DEVICE, REPLAYED, same_bits
from tests.engine.interrupted import Kept, Killed, KilledAt
from tests.engine.per_sample import naive as rows
from tests.engine.ranges.running import even
from tests.engine.replay.halves import first_outputs
from tests.oracle import TOLERANCE, difference
from tests.stateful_models import CACHING, STATEFUL, Naive, groups, loss, loss_of_some, naive_answer

ALL_GRAPHS = 10**9
RETAINED = (0, 300, ALL_GRAPHS)  # none, some, all
LOSSES = {"all": loss, "some": loss_of_some}


# What calls cache, which no state need hold, or an outline alone.
CACHED = (*CACHING, "parameters exchanged in a list")


@functools.cache
def _naive(name: str, of: str = "all") -> Naive:
    return naive_answer(STATEFUL[name].model, LOSSES[of])


def _agrees(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    unreached = [gradient for name, gradient in grads.items() if name not in expected]
    found = {name: grads[name] for name in expected}
    return difference(found, expected) <= TOLERANCE and not any(g.any() for g in unreached)


def _as_it_is(model: nn.Module) -> list[Any]:
    """Return which tensors, submodules and attributes a model has, and the buffers' values."""
    named = (*model.named_parameters(), *model.named_modules())
    buffers = model.named_buffers(remove_duplicate=False)
    return [
        *((name, id(one), type(one)) for name, one in named),
        *((name, id(b), b.requires_grad, repr(b.tolist())) for name, b in buffers),
        *(repr({**vars(module), "_modules": None}) for module in model.modules()),
        *(getattr(module, name, None) for module in model.modules() for name in ("calls", "sizes")),
    ]


@pytest.mark.parametrize("name", STATEFUL)
def test_the_gradient_is_that_of_naive_code_in_each_job_and_the_model_as_it_was(name):
    model = STATEFUL[name].model()
    before = _as_it_is(model)
    for (of, objective), retain in itertools.product(LOSSES.items(), RETAINED):
        found = set_gradient(
            model, groups(), Objective(objective), mode="train", retain=retain,
            returns=("grads", "buffers"),
        )  # fmt: skip
        expected = _naive(name, of)
        assert _agrees(found.grads, expected.grads), (of, retain)
        assert found.replay_difference <= REPLAYED
        for buffer, value in expected.buffers.items():
            torch.testing.assert_close(found.buffers[buffer], value, equal_nan=True, rtol=0, atol=0)
        assert _as_it_is(model) == before
        if retain == ALL_GRAPHS:
            assert (found.replayed == 0) != STATEFUL[name].in_order


@pytest.mark.parametrize(
    ("name", "retain", "of"),
    [
        *((name, retain, "all") for name in STATEFUL for retain in (0, 300, ALL_GRAPHS)),
        *((name, 0, "some") for name in CACHED),
    ],
)
def test_the_second_half_does_in_another_job(name, retain, of):
    """From kept graphs, or from outputs alone."""
    model = STATEFUL[name].model()
    first = set_outputs(model, groups(), mode="train", retain=retain)
    if retain == ALL_GRAPHS:  # none waits where others would be replayed out of order
        assert first.retained == (0 if STATEFUL[name].in_order else 5)
    assert (first.kept is None) == (first.retained == 0)
    z = first.outputs["z"].detach().clone().requires_grad_()
    (cotangent,) = torch.autograd.grad(LOSSES[of](z), z)
    given = first.kept or first_outputs(first)
    found = gradient_at_cotangents(model, groups(), {"z": {"": cotangent}}, given, mode="train")
    assert _agrees(found.grads, _naive(name, of).grads)


@pytest.mark.parametrize("name", CACHED)
def test_where_a_kept_graph_had_no_memory_all_shards_are_called_again_in_order(name):
    model, passes = STATEFUL[name].model(), itertools.count()

    def short_at_first(_gradient: Tensor) -> None:
        if next(passes) == 0:
            raise torch.OutOfMemoryError("short")

    for parameter in model.parameters():
        parameter.register_hook(short_at_first)
    found = set_gradient(model, groups(), Objective(loss), mode="train")
    assert found.replayed == 5
    assert _agrees(found.grads, _naive(name).grads)


@pytest.mark.parametrize("name", STATEFUL)
def test_shards_are_not_split_where_one_finds_what_others_left(name):
    coupled = STATEFUL[name].coupled
    if coupled is not None:
        with pytest.raises(CoupledShards, match=coupled):
            _in_ranges(name, groups())
        return
    (_, second) = even(groups(), 2)
    expected = naive_answer(STATEFUL[name].model, anew=[second.start])
    assert _agrees(_in_ranges(name, groups()), expected.grads)


# Its first shard leaves a tensor where there was none, which no other device finds: a limitation.
LEAVES_ONE = "output before, in turns"


@pytest.mark.parametrize(
    "name", [name for name, model in STATEFUL.items() if model.coupled and name != LEAVES_ONE]
)
def test_nor_are_single_shards(name):
    with pytest.raises(CoupledShards, match=STATEFUL[name].coupled):
        _in_ranges(name, [Group("z", groups()[0].shards[:2])])


def _in_ranges(name: str, of: list[Group]) -> dict[str, Tensor]:
    model = STATEFUL[name].model()
    return set_gradient(model, of, Objective(loss), ranges=even(of, 2), mode="train").grads


@pytest.mark.parametrize("place", [("forward", 3), ("replay", 3)])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_killed_job_has_the_same_bits(name, place):
    kept = Kept()
    with pytest.raises(Killed):
        _in_train(name, checkpoints=kept, observer=KilledAt(*place))
    assert bool(kept.num_written) == STATEFUL[name].checkpointed
    if kept.num_written:
        found, expected = _in_train(name, checkpoints=kept), _in_train(name)
        assert all(same_bits(found[n], grad) for n, grad in expected.items())


def _in_train(name: str, **told: Any) -> dict[str, Tensor]:
    model = STATEFUL[name].model()
    return set_gradient(model, groups(), Objective(loss), mode="train", **told).grads


@pytest.mark.parametrize("name", STATEFUL)
def test_rows_are_those_of_the_first_call(name):
    model, shard = STATEFUL[name].model(), groups()[0].shards[1]
    if STATEFUL[name].couples_samples:
        with pytest.raises(CoupledSamples):
            jacobian(model, [shard], mode="train")
        return
    plain = STATEFUL[name].model().train()
    parameters = dict(plain.named_parameters())  # before some exchange theirs
    expected = rows.flat(rows.rows(plain(shard["0"].to(DEVICE)), parameters))
    for _ in range(2):
        found = jacobian(model, [shard], mode="train")
        assert rows.difference(rows.flat(found.arrays), expected) <= rows.TOLERANCE


@pytest.mark.parametrize("name", STATEFUL)
def test_the_tangent_pass_of_a_mixed_gradient_finds_it(name):
    plain, shards = STATEFUL[name].model().train(), groups()[0].shards[:2]
    width = STATEFUL[name].model()(shards[0]["0"].to(DEVICE)).shape[1]
    y = torch.linspace(-1, 1, width, dtype=torch.float64, device=DEVICE).requires_grad_()

    def inner(y: Tensor, v: Tensor) -> Tensor:
        return (v**2 @ y).sum()

    def outer(dfdz: Tensor) -> Tensor:
        return dfdz.pow(2).sum()

    xs = [shard["0"].to(DEVICE, copy=True).requires_grad_() for shard in shards]
    dfdz = [torch.autograd.grad(inner(y, plain(x)), x, create_graph=True)[0] for x in xs]
    (expected,) = torch.autograd.grad(outer(torch.cat(dfdz)), y)
    found = mixed_gradient(
        STATEFUL[name].model(), Group("z", shards),
        Objective(inner, {"y": y}, {"y": y}), Objective(outer), mode="train",
    )  # fmt: skip
    assert difference(found.grads, {"y": expected}) <= TOLERANCE
