"""A job that was killed goes on from its last checkpoint, and returns the same bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbox_engine import Penalty
from tests.cases import CASES
from tests.engine.replay.halves import first_half
from tests.engine.replay.running import answer

PLENTY = 10**9


class Kept:
    """Keeps the last state as a file would: copies of tensors, and text."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        self.meta: str | None = None
        self.num_written = 0

    def due(self) -> bool:
        return True

    def write(self, state: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        self.state = {name: tensor.detach().clone() for name, tensor in state.items()}
        self.meta = json.dumps(meta)
        self.num_written += 1

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        return None if self.meta is None else (self.state, json.loads(self.meta))


class Killed(Exception):
    """The process ends here."""


class KilledAt:
    """Ends the job before a shard of a phase."""

    def __init__(self, phase: str, shard: int) -> None:
        self.place = (phase, shard)
        self.steps: list[tuple[str, int]] = []

    def step(self, phase: str, done: int, total: int) -> None:
        self.steps.append((phase, done))
        if (phase, done) == self.place:
            raise Killed


def _same(a: Any, b: Any) -> bool:
    tables = [(a.grads, b.grads), (a.buffers, b.buffers)]
    tables += [
        (dict(enumerate(x)), dict(enumerate(y)))
        for group, named in (a.input_grads or {}).items()
        for x, y in ((named[n], b.input_grads[group][n]) for n in named)
    ]
    return a.loss == b.loss and all(
        x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x) for x, y in tables
    )


@pytest.mark.parametrize("retain", [0, PLENTY])
@pytest.mark.parametrize("place", [("forward", 1), ("cotangents", 0), ("replay", 0), ("replay", 1)])
@pytest.mark.parametrize("name", CASES)
def test_a_killed_job_goes_on_with_the_same_bits(name, place, retain):
    case = CASES[name]()
    if max(len(shards) for shards in case.groups.values()) < 2:
        pytest.skip("a single shard has nothing to go on from")
    expected = answer(CASES[name]())
    kept, killed = Kept(), KilledAt(*place)
    with pytest.raises(Killed):
        answer(case, retain=retain, checkpoints=kept, observer=killed)
    assert kept.num_written
    resumed = KilledAt("never", 0)
    found = answer(CASES[name](), retain=retain, checkpoints=kept, observer=resumed)
    assert _same(found, expected)
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
    resumed = KilledAt("never", 0)
    assert _same(answer(case, checkpoints=kept, observer=resumed), expected)
    assert ("forward", 0) in resumed.steps  # of no shard
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


def test_a_replay_in_fp16_begins_again():
    case = CASES["mlp"]()
    case = replace(case, model=lambda: CASES["mlp"]().model().float())
    case = replace(case, groups={"z": [{"0": s["0"].float()} for s in case.groups["z"]]})
    expected = answer(case, precision="fp16")
    kept = Kept()
    with pytest.raises(Killed):
        answer(case, precision="fp16", checkpoints=kept, observer=KilledAt("replay", 2))
    resumed = KilledAt("never", 0)
    found = answer(case, precision="fp16", checkpoints=kept, observer=resumed)
    assert _same(found, expected)
    assert ("replay", 0) in resumed.steps


@pytest.mark.parametrize("name", ["mlp", "cnn in train", "average rebound", "two towers"])
def test_the_two_halves_go_on_as_well(name):
    whole = first_half(CASES[name]())
    cotangents, expected = whole.cotangents(), whole.gradient()
    kept = Kept()
    with pytest.raises(Killed):
        first_half(CASES[name](), checkpoints=kept, observer=KilledAt("forward", 2))
    steps = KilledAt("never", 0)
    outputs = first_half(CASES[name](), checkpoints=kept, observer=steps)
    for group, named in whole.found.outputs.items():
        assert all(torch.equal(outputs.found.outputs[group][n], z) for n, z in named.items())
    assert whole.first.buffers.keys() == outputs.first.buffers.keys()
    assert all(torch.equal(outputs.first.buffers[n], b) for n, b in whole.first.buffers.items())
    kept = Kept()
    outputs = first_half(CASES[name]())
    with pytest.raises(Killed):
        outputs.gradient(cotangents, checkpoints=kept, observer=KilledAt("replay", 2))
    steps = KilledAt("never", 0)
    found = outputs.gradient(cotangents, checkpoints=kept, observer=steps)
    assert all(torch.equal(found.grads[n], gradient) for n, gradient in expected.grads.items())
    assert ("replay", 0) not in steps.steps
