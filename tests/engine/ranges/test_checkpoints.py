"""A range that begins again goes on from its checkpoint, with the same bits."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from gradbox_engine.mixed import held_mixed, split_mixed_gradient
from gradbox_engine.ranges import OneDevice
from gradbox_engine.set_loss import held_job, split_set_gradient
from tests.cases import CASES
from tests.device import DEVICE, same_bits
from tests.engine.interrupted import Kept, Killed, KilledAt, undisturbed
from tests.engine.mixed.running import mixed_question
from tests.engine.ranges.running import even, same_result
from tests.engine.replay.running import question
from tests.mixed_cases import MIXED_CASES

NUM_RANGES = 2


def in_ranges_with(name: str, kept: dict[tuple[int, int], Kept], observer: KilledAt):
    """Answer a case in ranges on one device, each with a checkpoint."""
    case = CASES[name]()
    groups, objective, told = question(case)
    with held_job(
        case.model().to(DEVICE),
        groups,
        loss_parameters=tuple(objective.parameters),
        observer=observer,
        checkpoints=lambda part: kept[part.start, part.stop],
        **told,
    ) as job:
        told = {key: value for key, value in told.items() if key not in ("wrt", "retain")}
        parts = even(groups, NUM_RANGES)
        return split_set_gradient(OneDevice(job), parts, groups, objective, **told)


@pytest.mark.parametrize("name", ["cnn in train", "mlp, shards of one"])
@pytest.mark.parametrize("phase", ["forward", "replay"])
def test_a_range_goes_on_behind_the_last_shard_of_its_checkpoint(name: str, phase: str) -> None:
    kept: dict[tuple[int, int], Kept] = defaultdict(Kept)
    with pytest.raises(Killed):
        in_ranges_with(name, kept, KilledAt(phase, 1))
    whole, again = undisturbed(), undisturbed()
    found = in_ranges_with(name, kept, again)
    assert same_result(found, in_ranges_with(name, defaultdict(Kept), whole))
    shards = num_steps(whole)["forward"] - NUM_RANGES
    expected = {"forward": {"forward": 1}, "replay": {"forward": shards, "replay": 1}}
    assert num_steps(whole) - num_steps(again) == Counter(expected[phase])


def num_steps(observer: KilledAt) -> Counter[str]:
    """Return how many steps of each phase were told: one a shard, and one at a range's end."""
    return Counter(phase for phase, _ in observer.steps)


def mixed_in_ranges_with(name: str, kept: dict[tuple[int, int], Kept], observer: KilledAt):
    """Answer a mixed case in ranges on one device, each with a checkpoint."""
    case = MIXED_CASES[name]()
    group, inner, outer, told = mixed_question(case)
    returns, z = told.pop("returns"), told.pop("z")
    with held_mixed(
        case.model().to(DEVICE),
        group,
        inner,
        {**inner.parameters, **outer.parameters},
        z=z,
        observer=observer,
        checkpoints=lambda part: kept[part.start, part.stop],
        **told,
    ) as job:
        parts = even([group], NUM_RANGES)
        return split_mixed_gradient(OneDevice(job), parts, group, outer, returns=returns, **told)


@pytest.mark.parametrize("name", ["cnn in train", "mlp, outer reads y"])
@pytest.mark.parametrize("phase", ["forward", "replay"])
def test_a_range_of_a_mixed_gradient_goes_on(name: str, phase: str) -> None:
    kept: dict[tuple[int, int], Kept] = defaultdict(Kept)
    with pytest.raises(Killed):
        mixed_in_ranges_with(name, kept, KilledAt(phase, 1))
    whole, again = undisturbed(), undisturbed()
    found = mixed_in_ranges_with(name, kept, again)
    expected = mixed_in_ranges_with(name, defaultdict(Kept), whole)
    assert found.value == expected.value
    assert all(same_bits(found.grads[leaf], g) for leaf, g in expected.grads.items())
    assert found.fallbacks == expected.fallbacks
    shards = num_steps(whole)["forward"] - NUM_RANGES
    spared = {"forward": {"forward": 1}, "replay": {"forward": shards, "replay": 1}}
    assert num_steps(whole) - num_steps(again) == Counter(spared[phase])
