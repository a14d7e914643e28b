"""Outputs first and cotangents later, over ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradbox_engine import (
    BadInputs,
    CotangentGradient,
    CoupledShards,
    FirstOutputs,
    Group,
    ReplayMismatch,
    SetOutputs,
)
from gradbox_engine.ranges import GraphsBetweenJobs, OneDevice
from gradbox_engine.replay.retention import NONE_OLDER
from gradbox_engine.set_loss import held_job, split_gradient_at_cotangents, split_set_outputs
from tests.cases import CASES, Case
from tests.device import DEVICE, same_bits
from tests.engine.ranges.running import EXACT, Devices, even, held_by
from tests.engine.ranges.test_state import ReadsStatistics
from tests.engine.replay.halves import first_half, first_outputs
from tests.engine.replay.running import question
from tests.oracle import difference

NAMES = ["mlp", "cnn in train", "two towers", "transformer, a dict of parts", "one number a shard"]

NO_LOSS = ()
"""Names of the loss's parameters: the loss runs elsewhere."""


def outputs_of(
    case: Case, num_ranges: int, *, dies: Mapping[int, str] = {}, **terms: Any
) -> SetOutputs:
    groups, told = _asked(case, terms)
    told |= {"returns": ("buffers",), "for_a_later_job": True}
    with held_by(case, groups, NO_LOSS, num_ranges + 1, told) as jobs:
        return split_set_outputs(Devices(jobs, dies=dies), even(groups, num_ranges), groups)


def gradient_of(
    case: Case,
    num_ranges: int,
    cotangents: Any,
    first: FirstOutputs,
    *,
    dies: Mapping[int, str] = {},
    **terms: Any,
) -> CotangentGradient:
    groups, told = _asked(case, terms)
    with held_by(case, groups, NO_LOSS, num_ranges + 1, told) as jobs:
        return split_gradient_at_cotangents(
            Devices(jobs, dies=dies), even(groups, num_ranges), groups, cotangents, first
        )


def _asked(case: Case, terms: dict[str, Any]) -> tuple[Sequence[Group], dict[str, Any]]:
    order = terms.pop("order", None)
    groups, _, told = question(case)
    del told["returns"]
    groups = [Group(g.name, g.shards, method=g.method, order=order) for g in groups]
    return groups, told | terms


@pytest.mark.parametrize("num_ranges", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_one_device(name, num_ranges):
    one = first_half(CASES[name]()).first
    found = outputs_of(CASES[name](), num_ranges)
    assert (found.rows, found.stateful) == (one.rows, one.stateful)
    for group, named in first_outputs(one).outputs.items():
        again = first_outputs(found).outputs[group]
        assert all(same_bits(again[part], z) for part, z in named.items())
    assert list(found.buffers) == list(one.buffers)
    for buffer, value in one.buffers.items():
        assert torch.allclose(found.buffers[buffer], value, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("num_ranges", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_one_device(name, num_ranges):
    half = first_half(CASES[name]())
    found = gradient_of(CASES[name](), num_ranges, half.cotangents(), half.found)
    one = half.gradient()
    assert found.unreached == one.unreached
    assert difference(found.grads, one.grads) <= EXACT
    if num_ranges == 1:
        assert all(same_bits(found.grads[name], gradient) for name, gradient in one.grads.items())


def test_outputs_in_another_order_and_gradients_of_inputs():
    terms = {"order": torch.arange(14).flip(0), "wrt": ["4.*", "inputs.0"]}
    half = first_half(CASES["mlp"](), **terms)
    z = outputs_of(CASES["mlp"](), 2, **terms).outputs["z"]
    assert same_bits(z, half.first.outputs["z"])
    found = gradient_of(CASES["mlp"](), 2, half.cotangents(), half.found, **terms)
    one = half.gradient()
    assert difference(found.grads, one.grads) <= EXACT
    pairs = zip(found.input_grads["z"]["0"], one.input_grads["z"]["0"], strict=True)
    assert all(same_bits(a, b) for a, b in pairs)


def test_shards_that_changed_nothing_are_put_through_once():
    half = first_half(CASES["mlp"]())
    found = gradient_of(CASES["mlp"](), 2, half.cotangents(), half.found, retain=10**9)
    assert (found.retained, found.replayed) == (0, 4)


@pytest.mark.parametrize("gone", [(), (0,), (1,)])
@pytest.mark.parametrize("name", ["mlp", "cnn in train", "two towers"])
def test_graphs_that_a_device_kept_of_a_range_change_no_bit(name, gone):
    case, kept, half = CASES[name](), {}, first_half(CASES[name]())
    groups, told = _asked(case, {"retain": 10**9})
    model, parts = case.model().to(DEVICE), even(groups, 2)
    graphs = GraphsBetweenJobs(
        of=lambda part: kept.get(part.index),
        keep=lambda part, found: kept.update({part.index: found}),
        older=NONE_OLDER,
        records=lambda: [record for found in kept.values() for record in found.records],
    )
    with held_job(model, groups, graphs=graphs, for_a_later_job=True, **told) as job:
        first = split_set_outputs(OneDevice(job), parts, groups)
    assert [run.retained for run in first.ranges] == [part.num_shards for part in parts]
    for index in gone:
        del kept[index]
    with held_job(model, groups, graphs=graphs, **(told | {"retain": 0})) as job:
        found = split_gradient_at_cotangents(
            OneDevice(job), parts, groups, half.cotangents(), first_outputs(first)
        )
    expected = gradient_of(CASES[name](), 2, half.cotangents(), half.found)
    assert all(same_bits(found.grads[name], g) for name, g in expected.grads.items())
    assert all(
        run.retained == part.num_shards
        for run, part in zip(found.ranges, parts, strict=True)
        if part.index not in gone
    )
    assert not any(record.graph for record in graphs.records())


def test_outputs_that_depend_on_shards_before_are_refused():
    with pytest.raises(CoupledShards, match="'average'"):
        outputs_of(CASES["average in place"](), 2)
    with pytest.raises(CoupledShards, match=r"'norm\.running_mean'"):
        outputs_of(replace(CASES["mlp"](), model=lambda: ReadsStatistics().double()), 2)


@pytest.mark.parametrize("name", ["mlp", "cnn in train"])
def test_other_outputs_than_the_first_are_noticed(name):
    half = first_half(CASES[name]())
    moved = {group: {n: z * 1.001 for n, z in named.items()}
             for group, named in half.found.outputs.items()}  # fmt: skip
    first = FirstOutputs(moved, half.found.rows, half.found.stateful)
    with pytest.raises(ReplayMismatch):
        gradient_of(CASES[name](), 2, half.cotangents(), first)


def test_there_is_a_cotangent():
    half = first_half(CASES["mlp"]())
    with pytest.raises(BadInputs, match="got none"):
        gradient_of(CASES["mlp"](), 2, {}, half.found)


@pytest.mark.parametrize("phase", ["forward", "check"])
def test_outputs_with_a_lost_device(phase):
    found = outputs_of(CASES["cnn in train"](), 3, dies={1: phase})
    assert same_bits(found.outputs["z"], first_half(CASES["cnn in train"]()).first.outputs["z"])
    assert [run.devices_lost for run in found.ranges] == [0, 1, 0]


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("mlp", "resume"),
        ("mlp", "replay"),
        ("mlp", "added"),
        ("mlp", "fetched"),
        ("cnn in train", "forward"),
        ("cnn in train", "replay"),
    ],
)
def test_gradients_with_a_lost_device(name, phase):
    half = first_half(CASES[name]())
    whole = gradient_of(CASES[name](), 3, half.cotangents(), half.found)
    found = gradient_of(CASES[name](), 3, half.cotangents(), half.found, dies={0: phase})
    assert all(same_bits(found.grads[name], gradient) for name, gradient in whole.grads.items())
    assert found.ranges[0].devices_lost == 1
