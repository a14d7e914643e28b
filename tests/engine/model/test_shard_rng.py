"""The random numbers of a shard."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from gradbox_engine import shard_stream


def _draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.random())


def test_the_same_shard_draws_the_same_numbers_from_every_generator():
    with shard_stream(3, group=1, shard=7):
        first = _draw()
    _draw()
    with shard_stream(3, group=1, shard=7):
        assert _draw() == first


@pytest.mark.parametrize("other", [(4, 1, 7), (3, 2, 7), (3, 1, 8), (3, 7, 1)])
def test_another_seed_group_or_shard_draws_other_numbers(other):
    with shard_stream(3, 1, 7):
        first = _draw()
    with shard_stream(*other):
        assert all(a != b for a, b in zip(_draw(), first, strict=True))


def test_generators_go_on_as_if_the_stream_had_not_been():
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = _draw()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    with shard_stream(3, 1, 7):
        _draw()
    assert _draw() == expected


def test_generators_are_put_back_after_an_error():
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = _draw()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    with pytest.raises(ZeroDivisionError), shard_stream(3, 1, 7):
        1 / torch.zeros(()).int().item()
    assert _draw() == expected


def test_large_seeds_are_taken_whole():
    with shard_stream(2**63 - 1, 0, 0):
        first = _draw()
    with shard_stream(2**31 - 1, 0, 0):
        assert _draw() != first


@pytest.mark.parametrize("num_drawn", [0, 1, 2])
def test_numpy_s_state_is_put_back_but_for_a_kept_normal_number(num_drawn):
    """After one normal number NumPy keeps another, which no seed makes."""
    np.random.seed(5)
    np.random.standard_normal(num_drawn)
    before = np.random.get_state(legacy=False)
    with shard_stream(3, 1, 7):
        in_stream = np.random.standard_normal(3)
    after = np.random.get_state(legacy=False)
    with shard_stream(3, 1, 7):
        assert np.array_equal(np.random.standard_normal(3), in_stream)
    assert not after["has_gauss"]
    assert before["state"]["pos"] == after["state"]["pos"]
    assert np.array_equal(before["state"]["key"], after["state"]["key"])


def test_streams_within_a_stream_leave_its_numbers_alone():
    with shard_stream(3, 1, 7):
        expected = [_draw(), _draw()]
    with shard_stream(3, 1, 7):
        first = _draw()
        with shard_stream(3, 1, 8):
            _draw()
        assert [first, _draw()] == expected


def test_a_stream_after_a_stream_begins_with_no_kept_normal_number():
    with shard_stream(3, 1, 7):
        expected = np.random.standard_normal(2)
        np.random.standard_normal()
    with shard_stream(3, 1, 7):
        assert np.array_equal(np.random.standard_normal(2), expected)


def test_a_bit_generator_of_the_user_s_is_put_back_untouched():
    before = np.random.get_bit_generator()
    mine = np.random.PCG64(5)
    np.random.set_bit_generator(mine)
    try:
        state = mine.state
        with shard_stream(3, 1, 7):
            _draw()
            np.random.set_bit_generator(np.random.MT19937(1))  # as a model may
        assert np.random.get_bit_generator() is mine
        assert mine.state == state
    finally:
        np.random.set_bit_generator(before)
