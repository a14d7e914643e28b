"""A mixed gradient that was killed goes on from its last checkpoint, and returns the same bits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from gradbox_engine import MixedResult
from tests.device import same_bits
from tests.engine.interrupted import Kept, Killed, KilledAt, undisturbed
from tests.engine.mixed.running import mixed_answer
from tests.mixed_cases import MIXED_CASES, OBSTACLES, normal

CASES = MIXED_CASES | OBSTACLES
SEVERAL_SHARDS = [name for name, case in CASES.items() if 1 < len(case().shards) < 5]


def same(found: MixedResult, expected: MixedResult) -> bool:
    assert found.dfdz is not None
    assert expected.dfdz is not None
    facts = ("value", "unreached", "tangents", "fallbacks", "replay_difference")
    return (
        all(getattr(found, fact) == getattr(expected, fact) for fact in facts)
        and found.grads.keys() == expected.grads.keys()
        and all(same_bits(found.grads[name], x) for name, x in expected.grads.items())
        and same_bits(found.dfdz, expected.dfdz)
    )


@cache
def expected_answer(name: str) -> MixedResult:
    return mixed_answer(CASES[name]())


@pytest.mark.parametrize("place", [("forward", 1), ("cotangents", 0), ("replay", 0), ("replay", 1)])
@pytest.mark.parametrize("name", SEVERAL_SHARDS)
def test_a_killed_job_goes_on_with_the_same_bits(name: str, place: tuple[str, int]) -> None:
    kept, killed = Kept(), KilledAt(*place)
    with pytest.raises(Killed):
        mixed_answer(CASES[name](), checkpoints=kept, observer=killed)
    assert kept.num_written
    resumed = undisturbed()
    found = mixed_answer(CASES[name](), checkpoints=kept, observer=resumed)
    assert same(found, expected_answer(name))
    for phase in ("forward", "replay"):
        first = {done for at, done in killed.steps[:-1] if at == phase}
        again = {done for at, done in resumed.steps if at == phase}
        assert len(first & again) <= 1  # the number of those that are done is said again


def test_only_the_shards_since_the_last_checkpoint_run_again() -> None:
    def anew(**given: Any) -> MixedResult:
        return mixed_answer(CASES["mlp, 32 shards"](), **given)

    expected, kept = anew(), Kept()
    with pytest.raises(Killed):
        anew(checkpoints=kept, observer=KilledAt("replay", 25))
    resumed = undisturbed()
    assert same(anew(checkpoints=kept, observer=resumed), expected)
    assert [done for phase, done in resumed.steps if phase == "forward"] == [32]
    assert [done for phase, done in resumed.steps if phase == "replay"] == list(range(25, 33))


@pytest.mark.parametrize("place", [("forward", 2), ("replay", 1)])
def test_a_job_in_fp16_goes_on_with_the_same_bits(place: tuple[str, int]) -> None:
    def anew(**given: Any) -> MixedResult:
        case = CASES["mlp, cubic"]()
        shards = [{n: x.float() for n, x in s.items()} for s in normal((3, 3, 1), 5)]
        y = {name: x.detach().float() for name, x in case.y.items()}
        narrow = type(case)(lambda: case.model().float(), shards, case.inner, case.outer, y)
        return mixed_answer(narrow, precision="fp16", **given)

    expected, kept = anew(), Kept()
    with pytest.raises(Killed):
        anew(checkpoints=kept, observer=KilledAt(*place))
    assert same(anew(checkpoints=kept), expected)
