"""Where a job is cut, how sums are added, and how several ranges wait at once."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from gradbox_engine import BadInputs
from gradbox_engine.ranges import Range, added, cut
from gradbox_engine.ranges.coroutines import run_together
from gradbox_engine.ranges.reduction import split_in_tree


def _ends(parts: tuple[Range, ...]) -> list[int]:
    return [part.stop for part in parts]


@pytest.mark.parametrize(
    ("costs", "num_ranges", "ends"),
    [
        ([1] * 9, 3, [3, 6, 9]),
        ([1] * 10, 4, [2, 5, 7, 10]),
        ([1] * 3, 8, [1, 2, 3]),
        ([5], 1, [1]),
        ([9, 1, 1, 1, 1, 1, 1, 1, 1, 1], 2, [1, 10]),
        ([1, 1, 1, 1, 1, 9], 2, [5, 6]),
        ([100, 1, 1], 3, [1, 2, 3]),
        ([1, 1, 100], 3, [1, 2, 3]),
        ([0, 0, 0, 0], 2, [2, 4]),
    ],
)
def test_shards_are_cut_by_cost(costs, num_ranges, ends):
    assert _ends(cut(costs, num_ranges)) == ends


def test_ranges_cover_all_shards_and_none_costs_much_more_than_its_share():
    drawn = random.Random(0)
    for _ in range(200):
        costs = [drawn.randint(0, 50) for _ in range(drawn.randint(1, 60))]
        parts = cut(costs, drawn.randint(1, 12))
        assert [part.start for part in parts] == [0, *_ends(parts)[:-1]]
        assert parts[-1].stop == len(costs)
        assert [part.index for part in parts] == list(range(len(parts)))
        assert all(part.num_shards > 0 and part.num_ranges == len(parts) for part in parts)
        dearest = max(sum(costs[part.start : part.stop]) for part in parts)
        assert dearest <= sum(costs) / len(parts) + max(costs)


@pytest.mark.parametrize(("costs", "num_ranges"), [([], 2), ([1.0], 0)])
def test_there_is_something_to_cut(costs, num_ranges):
    with pytest.raises(BadInputs, match="expected one or more"):
        cut(costs, num_ranges)


def test_the_tree_is_that_of_levels():
    def nested(nodes):
        if len(nodes) == 1:
            return nodes[0]
        left, right = split_in_tree(nodes)
        return (nested(left), nested(right))

    for number in range(1, 20):
        level = list(range(number))
        while len(level) > 1:
            pairs = list(zip(level[::2], level[1::2], strict=False))
            level = [*pairs, *level[2 * len(pairs) :]]
        assert nested(list(range(number))) == level[0]


def test_a_parameter_that_one_range_reaches_is_what_it_has_there():
    left, right = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.full((1,), 3.0)}
    total = added(left, right)
    assert {name: tensor.tolist() for name, tensor in total.items()} == {"a": [2, 2], "b": [3]}


def test_coroutines_end_in_any_order_and_return_in_theirs():
    first_may_end = Event()
    ended: list[int] = []

    def coroutine(number: int):
        def work() -> int:
            assert number != 0 or first_may_end.wait(60)
            return number

        value = yield pool.submit(work)
        ended.append(number)
        if number == 2:
            first_may_end.set()
        return value * 10

    with ThreadPoolExecutor(3) as pool:
        assert run_together([coroutine(number) for number in range(3)]) == [0, 10, 20]
    assert ended.index(2) < ended.index(0)


def test_a_coroutine_catches_an_error_and_may_go_on():
    def failing() -> None:
        raise KeyError("once")

    def coroutine():
        try:
            yield pool.submit(failing)
        except KeyError:
            return (yield pool.submit(int, 7))

    with ThreadPoolExecutor(1) as pool:
        assert run_together([coroutine()]) == [7]


def test_waiting_can_be_stopped(monkeypatch):
    monkeypatch.setattr("gradbox_engine.ranges.coroutines.TICK_S", 0.01)
    release = Event()

    def tick(_ended: list[int]) -> None:
        raise InterruptedError

    def coroutine():
        yield pool.submit(release.wait, 60)

    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(InterruptedError):
            run_together([coroutine()], tick=tick)
        release.set()
    assert time.monotonic() - start < 50
