"""The engine against naive code on the whole problem table, and the comparison against itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gradbox_engine import shard_stream
from tests.cases import CASES
from tests.device import DEVICE, REPLAYED
from tests.engine.replay.running import answer
from tests.oracle import TOLERANCE, difference, naive

ALL_CASES = pytest.mark.parametrize("name", CASES)


@ALL_CASES
def test_the_gradient_is_that_of_naive_code(name):
    expected = naive(CASES[name]())
    result = answer(CASES[name]())
    assert result.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    assert difference(result.grads, expected.grads) <= TOLERANCE
    assert set(result.unreached) == expected.unreached
    assert result.replay_difference <= REPLAYED


@ALL_CASES
def test_buffers_advance_once_per_shard(name):
    expected = naive(CASES[name]())
    result = answer(CASES[name]())
    assert result.buffers.keys() == expected.buffers.keys()
    for buffer, value in expected.buffers.items():
        torch.testing.assert_close(result.buffers[buffer], value, rtol=TOLERANCE, atol=0)


@ALL_CASES
def test_every_shard_but_the_last_is_replayed(name):
    result = answer(CASES[name]())
    assert (result.retained, result.replayed) == (1, sum(result.shards.values()) - 1)


def test_a_gradient_scaled_by_a_thousandth_fails_the_comparison():
    expected = naive(CASES["transformer"]()).grads
    scaled = {name: gradient * 1.001 for name, gradient in expected.items()}
    assert difference(scaled, expected) > 9e-4


def test_a_dropped_shard_fails_the_comparison():
    case = CASES["mlp"]()
    fewer = dataclasses.replace(case, groups={"z": case.groups["z"][:-1]})
    assert difference(answer(fewer).grads, naive(case).grads) > 1e-3


def test_another_dropout_mask_fails_the_comparison():
    case = CASES["transformer"]()
    assert difference(answer(case, seed=case.seed + 1).grads, naive(case).grads) > 1e-3


def test_a_missing_gradient_fails_the_comparison():
    expected = naive(CASES["mlp"]()).grads
    assert difference({"0.weight": expected["0.weight"]}, expected) == float("inf")


def test_the_reference_in_the_documentation_is_the_oracle():
    case = CASES["cnn in train"]()
    model = case.model().to(DEVICE).train()
    zs = []
    for i, x in enumerate(case.groups["z"]):
        with shard_stream(case.seed, group=0, shard=i):
            zs.append(model(x["0"].to(DEVICE)))
    case.loss(torch.cat(zs)).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert difference(answer(case).grads, grads) <= TOLERANCE
