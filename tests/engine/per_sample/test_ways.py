"""Odd ways to use a parameter: rows are exact in every job, and looped over only where said."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import jacobian, per_sample_gradient
from tests.device import DEVICE, moved
from tests.engine.per_sample import naive
from tests.engine.per_sample.ways import NARROW, WAYS, Shard, Way


def built(name: str, dtype: torch.dtype = torch.float64) -> Way:
    """Return a way anew, with the same weights and shards every time."""
    torch.manual_seed(0)
    way = WAYS[name]()
    shards = [
        moved({n: x.to(dtype) if x.is_floating_point() else x for n, x in shard.items()})
        for shard in way.shards
    ]
    model, plain = way.model.to(DEVICE, dtype), way.plain and way.plain.to(DEVICE, dtype)
    getattr(model, "turn", dict)()
    return replace(way, model=model, plain=plain, shards=shards)


@cache
def expected_rows(name: str) -> list[Tensor]:
    """Return (B, Y, P) of every shard, each by a model that no other shard has called."""
    found = []
    for index in range(len(built(name).shards)):
        way = built(name)
        model = (way.plain or way.model).train(way.mode == "train")
        found.append(naive.flat(naive.jacobian(model, way.shards[index])))
    return found


def rows(way: Way, model: nn.Module, shards: list[Shard]) -> Tensor:
    result = jacobian(model, shards, mode=way.mode)
    if way.loops is not None:
        assert result.loops.keys() == way.loops
    assert all(reason.startswith(way.why) for reason in result.loops.values()), result.loops
    return naive.flat(result.arrays)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*beta state")
@pytest.mark.parametrize("name", WAYS)
def test_rows_are_those_of_one_backward_a_sample(name: str) -> None:
    expected, way = expected_rows(name), built(name)
    tolerance = way.near * naive.TOLERANCE
    given = [{n: x.clone() for n, x in shard.items()} for shard in way.shards]
    buffers = {n: x.clone() for n, x in way.model.named_buffers()}
    # Jobs one after the other: the first shard under a new plan and a kept one, then the others.
    for index in (0, *range(len(way.shards))):
        found = rows(way, way.model, [way.shards[index]])
        assert naive.difference(found, expected[index]) <= tolerance
    whole = rows(way, built(name).model, way.shards)
    assert naive.difference(whole, torch.cat(expected)) <= tolerance
    for shard, before in zip(way.shards, given, strict=True):
        assert all(torch.equal(shard[n], x) for n, x in before.items())
    left = dict(way.model.named_buffers())
    assert left.keys() == buffers.keys()
    assert all(torch.equal(x, left[n]) for n, x in buffers.items())
    assert all(parameter.grad is None for parameter in way.model.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*beta state")
@pytest.mark.parametrize("name", WAYS)
def test_so_are_products_with_cotangents_and_rows_of_a_loss(name: str) -> None:
    (expected, *_), way = expected_rows(name), built(name)
    tolerance = way.near * naive.TOLERANCE
    (z_shape,) = {x.shape for x in [jacobian(way.model, way.shards[:1], mode=way.mode).values]}
    u = torch.linspace(-1, 1, z_shape.numel()).double().to(DEVICE).view(z_shape)
    pulled = jacobian(way.model, way.shards[:1], mode=way.mode, reduce="vjp", vectors=u).arrays
    product = torch.einsum("by,byp->p", u.view(expected.shape[:2]), expected)
    assert naive.difference(naive.flat(pulled, 0), product) <= tolerance
    unchecked = ["self"] if way.loops == set() else []  # what has a rule needs no comparison
    result = per_sample_gradient(
        built(name).model,
        way.shards[:1],
        lambda z: z.flatten(1).cumsum(1).sum(1),
        mode=way.mode,
        unchecked=unchecked,
    )
    weights = torch.arange(expected.shape[1], 0, -1).to(expected)
    row = torch.einsum("y,byp->bp", weights, expected)
    assert naive.difference(naive.flat(result.arrays, 1), row) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NARROW)
def test_what_adds_little_is_there_in_fewer_bits(name: str, dtype: torch.dtype) -> None:
    way = built(name, dtype)

    def losses(z: Tensor) -> Tensor:
        return z.float().square().sum(1)

    parameters = dict(way.model.named_parameters())
    expected = naive.rows(losses(way.model(*way.shards[0].values()))[:, None], parameters)
    found = per_sample_gradient(way.model, way.shards, losses)
    for name, row in expected.items():
        near = 8 * torch.finfo(dtype).eps * float(row.abs().amax())
        torch.testing.assert_close(found.arrays[name], row[:, 0], rtol=0.0, atol=near)
