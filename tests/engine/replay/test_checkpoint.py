"""A job that was killed goes on from its last checkpoint, and returns the same bits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from gradbox_engine import Penalty
from tests.cases import CASES
from tests.device import same_bits
from tests.engine.interrupted import Kept, Killed, KilledAt, undisturbed
from tests.engine.replay.halves import first_half
from tests.engine.replay.running import answer

PLENTY = 10**9
BEGIN_AGAIN = ("average rebound", "average saved", "classic spectral norm")
"""Whose shards bind a buffer or an attribute anew, so that no checkpoint is written."""


def _same(a: Any, b: Any) -> bool:
    tables = [(a.grads, b.grads), (a.buffers, b.buffers)]
    tables += [
        (dict(enumerate(x)), dict(enumerate(y)))
        for group, named in (a.input_grads or {}).items()
        for x, y in ((named[n], b.input_grads[group][n]) for n in named)
    ]
    return a.loss == b.loss and all(
        x.keys() == y.keys() and all(same_bits(x[n], y[n]) for n in x) for x, y in tables
    )


@cache
def expected_answer(name):
    return answer(CASES[name]())


@pytest.mark.parametrize(
    ("place", "retain"),
    [
        (("forward", 1), PLENTY),
        (("cotangents", 0), 0),
        (("replay", 0), PLENTY),
        (("replay", 1), 0),
        (("replay", 1), PLENTY),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_a_killed_job_goes_on_with_the_same_bits(name, place, retain):
    case = CASES[name]()
    if max(len(shards) for shards in case.groups.values()) < 2:
        pytest.skip("a single shard has nothing to go on from")
    kept, killed = Kept(), KilledAt(*place)
    with pytest.raises(Killed):
        answer(case, retain=retain, checkpoints=kept, observer=killed)
    assert bool(kept.num_written) == (name not in BEGIN_AGAIN)
    resumed = undisturbed()
    found = answer(CASES[name](), retain=retain, checkpoints=kept, observer=resumed)
    assert _same(found, expected_answer(name))
    if name in BEGIN_AGAIN:
        return
    # What was done before the kill is not done again.
    first = sum(phase == "forward" for phase, _ in killed.steps) - 1
    again = sum(phase == "forward" for phase, _ in resumed.steps) - 1
    num_shards = sum(map(len, case.groups.values()))
    assert again <= num_shards - min(first, num_shards)


def test_only_the_shards_since_the_last_checkpoint_run_again():
    case = CASES["mlp"]()
    case = replace(case, groups={"z": case.groups["z"] * 15}, loss=torch.var)
    expected = answer(case)
    kept = Kept()
    with pytest.raises(Killed):
        answer(case, checkpoints=kept, observer=KilledAt("replay", 50))
    resumed = undisturbed()
    assert _same(answer(case, checkpoints=kept, observer=resumed), expected)
    assert [done for phase, done in resumed.steps if phase == "forward"] == [60]  # of 60 shards
    assert [done for phase, done in resumed.steps if phase == "replay"] == list(range(50, 61))


def test_penalties_and_gradients_of_inputs_go_on_as_well():
    case = replace(CASES["cnn in train"](), wrt=["*", "inputs.0"])
    terms = {"penalties": [Penalty("1", lambda tap: tap.square().mean(), 0.3)]}
    expected = answer(case, **terms)
    assert expected.input_grads is not None
    kept = Kept()
    with pytest.raises(Killed):
        answer(case, checkpoints=kept, observer=KilledAt("replay", 2), **terms)
    assert _same(answer(case, checkpoints=kept, **terms), expected)


def in_float32(case):
    model = case.model
    groups = {
        name: [{n: x.float() if x.is_floating_point() else x for n, x in s.items()} for s in shards]
        for name, shards in case.groups.items()
    }
    return replace(case, model=lambda: model().float(), groups=groups)


@pytest.mark.parametrize("place", [("replay", 0), ("replay", 1), ("replay", 2)])
def test_a_replay_in_fp16_goes_on_at_its_scale(place):
    case = in_float32(CASES["mlp"]())
    expected = answer(case, precision="fp16")
    kept = Kept()
    with pytest.raises(Killed):
        answer(case, precision="fp16", checkpoints=kept, observer=KilledAt(*place))
    resumed = undisturbed()
    found = answer(case, precision="fp16", checkpoints=kept, observer=resumed)
    assert _same(found, expected)
    assert next(step for step in resumed.steps if step[0] == "replay") == place


class KilledAtTheSecond(KilledAt):
    """Ends the job at the second time that a shard of a phase is reached."""

    def step(self, phase, done, total):
        if (phase, done) == self.place and (phase, done) not in self.steps:
            self.steps.append((phase, done))
            return
        super().step(phase, done, total)


def steep() -> nn.Module:
    """Three layers that enlarge a gradient beyond float16."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(8.0 if "weight" in name else 0.0)
    return model


def test_a_replay_in_fp16_that_was_repeated_goes_on_at_the_smaller_scale():
    shards = [{"0": torch.full((2, 4), 2.0**-8)} for _ in range(4)]
    case = replace(CASES["mlp"](), model=steep, groups={"z": shards}, loss=torch.sum)
    steps = undisturbed()
    expected = answer(case, precision="fp16", observer=steps)
    assert steps.steps.count(("replay", 0)) == 2
    kept, killed = Kept(), KilledAtTheSecond("replay", 2)
    with pytest.raises(Killed):
        answer(case, precision="fp16", checkpoints=kept, observer=killed)
    resumed = undisturbed()
    found = answer(case, precision="fp16", checkpoints=kept, observer=resumed)
    assert _same(found, expected)
    assert [done for phase, done in resumed.steps if phase == "replay"] == [2, 3, 4]


@pytest.mark.parametrize("name", ["mlp", "cnn in train", "two towers"])
def test_the_two_halves_go_on_as_well(name):
    whole = first_half(CASES[name]())
    cotangents, expected = whole.cotangents(), whole.gradient()
    kept = Kept()
    with pytest.raises(Killed):
        first_half(CASES[name](), checkpoints=kept, observer=KilledAt("forward", 2))
    outputs = first_half(CASES[name](), checkpoints=kept)
    for group, named in whole.found.outputs.items():
        assert all(same_bits(outputs.found.outputs[group][n], z) for n, z in named.items())
    assert whole.first.buffers.keys() == outputs.first.buffers.keys()
    assert all(same_bits(outputs.first.buffers[n], b) for n, b in whole.first.buffers.items())
    kept = Kept()
    outputs = first_half(CASES[name]())
    with pytest.raises(Killed):
        outputs.gradient(cotangents, checkpoints=kept, observer=KilledAt("replay", 2))
    steps = undisturbed()
    found = outputs.gradient(cotangents, checkpoints=kept, observer=steps)
    assert all(same_bits(found.grads[n], gradient) for n, gradient in expected.grads.items())
    assert ("replay", 0) not in steps.steps
