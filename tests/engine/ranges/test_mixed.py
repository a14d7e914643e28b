"""Mixed gradients in ranges: dfdz joined, `outer` once, tangents where the shards are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradbox_engine import CoupledShards, MixedResult, ReplayMismatch
from gradbox_engine.mixed import held_mixed, split_mixed_gradient
from gradbox_engine.ranges import OneDevice
from tests.case_models import average_in_place
from tests.device import DEVICE, same_bits
from tests.engine.mixed.running import mixed_answer, mixed_question
from tests.engine.ranges.running import EXACT, Devices, even
from tests.engine.ranges.test_state import CountsCalls, ReadsStatistics
from tests.mixed_cases import MIXED_CASES, MixedCase, normal
from tests.oracle import difference

NAMES = [
    "mlp, cubic",
    "mlp, one shard",
    "mlp, all shards coupled",
    "mlp, outer reads y",
    "cnn in train",
    "transformer",
]


def mixed_in_ranges(
    case: MixedCase, num_ranges: int, *, dies: Mapping[int, str] | None = None, **terms: Any
) -> MixedResult:
    """Answer a case in ranges: on one device, or on one for each and one to spare, if some die."""
    group, inner, outer, told = mixed_question(case)
    told |= terms
    returns = told.pop("returns")
    leaves = {**inner.parameters, **outer.parameters}
    parts = even([group], num_ranges)
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(held_mixed(case.model().to(DEVICE), group, inner, leaves, **told))
            for _ in range(1 if dies is None else len(parts) + 1)
        ]
        devices = OneDevice(jobs[0]) if dies is None else Devices(jobs, dies=dies)
        del told["z"]
        return split_mixed_gradient(devices, parts, group, outer, returns=returns, **told)


@pytest.mark.parametrize("num_ranges", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_ranges_give_the_gradient_of_one_device(name, num_ranges):
    found, one = mixed_in_ranges(MIXED_CASES[name](), num_ranges), mixed_answer(MIXED_CASES[name]())
    assert difference(found.grads, one.grads) <= EXACT
    assert (found.value, found.unreached) == (one.value, one.unreached)
    assert (found.shards, found.tangents) == (one.shards, one.tangents)
    assert found.fallbacks == one.fallbacks
    assert same_bits(found.dfdz, one.dfdz)
    if num_ranges == 1:
        assert all(same_bits(found.grads[name], gradient) for name, gradient in one.grads.items())


@pytest.mark.parametrize("phase", ["forward", "replay", "added", "fetched"])
def test_a_lost_device_costs_its_range(phase):
    found = mixed_in_ranges(MIXED_CASES["cnn in train"](), 2, dies={0: phase})
    whole = mixed_in_ranges(MIXED_CASES["cnn in train"](), 2)
    assert all(same_bits(found.grads[name], gradient) for name, gradient in whole.grads.items())
    assert found.ranges[0].devices_lost == 1


@pytest.mark.parametrize(
    ("model", "buffer"),
    [(average_in_place, "average"), (ReadsStatistics, "norm.running_mean"), (CountsCalls, "calls")],
)
def test_a_model_that_reads_what_shards_change_is_not_split(model, buffer):
    y = {
        "y": torch.ones(model().double()(torch.ones(3, 5).double()).shape[1])
        .double()
        .requires_grad_()
    }
    case = replace(
        MIXED_CASES["mlp, bilinear"](), model=lambda: model().double(),
        shards=normal((3, 3, 2), 5), y=y,
    )  # fmt: skip
    with pytest.raises((CoupledShards, ReplayMismatch)) as caught:
        mixed_in_ranges(case, 2)
    assert buffer in str(caught.value)
