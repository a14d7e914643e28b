"""The problem table in one, two and three ranges."""

from __future__ import annotations

import pytest

from gradbox_engine import CoupledShards
from tests.cases import CASES
from tests.engine.ranges.running import EXACT, in_ranges, on_devices, same_result
from tests.engine.replay.running import answer
from tests.oracle import TOLERANCE, difference, naive

COUPLED = {
    "average in place": "average",
    "average by .data": "average",
    "average rebound": "average",
    "average saved": "average",
    "spectral norm": "2.parametrizations.weight.0._u",
    "classic spectral norm": "2.weight_u",
}
"""Problems whose outputs depend on a buffer that shards change, and its name."""

SPLIT = sorted(CASES.keys() - COUPLED.keys())


@pytest.mark.parametrize("name", CASES)
def test_one_range_has_the_bits_of_set_gradient(name):
    found = in_ranges(CASES[name](), 1, retain=10**9)
    one = answer(CASES[name](), retain=10**9)
    assert same_result(found, one)
    assert (found.retained, found.replayed) == (one.retained, one.replayed)


@pytest.mark.parametrize("num_ranges", [2, 3])
@pytest.mark.parametrize("name", SPLIT)
def test_ranges_give_the_gradient_of_one_device(name, num_ranges):
    found = in_ranges(CASES[name](), num_ranges)
    one = answer(CASES[name]())
    assert difference(found.grads, one.grads) <= EXACT
    assert found.loss == one.loss
    assert found.unreached == one.unreached
    assert found.shards == one.shards


@pytest.mark.parametrize("name", SPLIT)
def test_ranges_give_the_gradient_of_naive_code(name):
    found, expected = in_ranges(CASES[name](), 2, retain=10**9), naive(CASES[name]())
    assert difference(found.grads, expected.grads) <= TOLERANCE
    assert found.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    assert set(found.unreached) == expected.unreached


@pytest.mark.parametrize("name", ["cnn in train", "two towers", "transformer", "lstm"])
def test_devices_give_the_bits_of_the_same_ranges_on_one(name):
    found, devices = on_devices(CASES[name](), 3)
    assert same_result(found, in_ranges(CASES[name](), 3))
    assert len({number for kind, number in devices.calls if kind == "forward"}) == len(found.ranges)


@pytest.mark.parametrize("name", COUPLED)
def test_a_buffer_on_which_outputs_depend_refuses_the_split(name):
    with pytest.raises(CoupledShards, match="on one device") as caught:
        in_ranges(CASES[name](), 2)
    assert caught.value.name == COUPLED[name]
