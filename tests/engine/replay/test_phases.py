"""The phases one by one, over any range of shards: what a crash, or a second worker, resumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.prepared import Prepared, prepared
from gradbox_engine.model.state.buffers import packed, unpacked
from gradbox_engine.model.wrt import select
from gradbox_engine.replay.cotangents import differentiate
from gradbox_engine.replay.first_pass import GraphCalls, first_pass
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.replay import replay
from gradbox_engine.replay.retention import GraphBudget
from gradbox_engine.replay.shard_record import ShardRecord
from gradbox_engine.replay.z import ShardRows, concatenated
from gradbox_engine.requests import CallOptions, Group, Objective, Silent
from tests.cases import CASES, Case
from tests.device import DEVICE, same_bits
from tests.oracle import TOLERANCE, difference, naive


def _first_pass(ready: Prepared, positions: Sequence[Position], records: list[ShardRecord]) -> None:
    calls = GraphCalls(ready, len(positions) - len(records), budget=GraphBudget(0))
    first_pass(ready, positions, records, calls, observer=Silent())


def _resumed(case: Case, ranges: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Run each phase range by range, every replay on a model that has not seen the first pass."""
    groups = [Group("z", case.groups["z"])]
    terms = CallOptions(seed=case.seed, mode=case.mode, output=case.output, readout=case.readout)
    model = case.model().to(DEVICE)
    done: list[ShardRecord] = []
    with prepared(model, groups, select(model, case.wrt), terms) as ready:
        for shards in ranges:
            positions = [Position(0, shard) for shard in range(shards[-1] + 1)]
            _first_pass(ready, positions, done)
        states = packed([done[0].before, *(r.after for r in done)])
    outputs = {record.position: record.outputs for record in done}
    whole, num_rows = concatenated(groups, outputs)
    loss = differentiate(
        Objective(case.loss, case.loss_inputs),
        whole,
        groups,
        device=DEVICE,
        seed=case.seed,
        widened=False,
    )
    cotangents = ShardRows(groups, num_rows).parts(loss.cotangents)
    partial = []
    for shards in ranges:
        fresh = case.model().to(DEVICE)
        selection = select(fresh, case.wrt)
        sums = GradientSums(selection.parameters)
        with prepared(fresh, groups, selection, terms) as ready:
            found = unpacked(states, ready.buffers.first)
            part = [
                replace(done[i], before=found[i], after=found[i + 1], graph=None) for i in shards
            ]
            mine = {record.position: cotangents[record.position] for record in part}
            replay(ready, part, mine, sums, observer=Silent())
        partial.append(sums.reached())
    names = {name for named in partial for name in named}
    return {name: sum(named[name] for named in partial if name in named) for name in names}


@pytest.mark.parametrize("ranges", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1, 2], [3]]])
@pytest.mark.parametrize("name", ["mlp", "cnn in train", "spectral norm", "layer drop by random"])
def test_partial_gradients_of_any_ranges_add_up(name, ranges):
    assert difference(_resumed(CASES[name](), ranges), naive(CASES[name]()).grads) <= TOLERANCE


def test_a_first_pass_can_go_on_elsewhere():
    case = CASES["cnn in train"]()
    groups = [Group("z", case.groups["z"])]
    terms = CallOptions(seed=case.seed, mode="train")

    def run(num_shards, done=()):
        model = case.model().to(DEVICE)
        positions = [Position(0, shard) for shard in range(num_shards)]
        with prepared(model, groups, select(model, None), terms) as ready:
            records = list(done)
            _first_pass(ready, positions, records)
            return records

    whole = run(4)
    half = run(2)
    again = run(4, half)
    assert again[:2] == half
    for a, b in zip(whole, again, strict=True):
        assert same_bits(a.outputs[""], b.outputs[""])
    for slot, value in whole[-1].after.values.items():
        assert same_bits(value, again[-1].after.values[slot])
