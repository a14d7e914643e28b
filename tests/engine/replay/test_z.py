"""Z is the shards' outputs side by side, and each shard finds its rows in it."""

from __future__ import annotations

import pytest
import torch

from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.replay.z import ShardRows, concatenated, ordered, unordered
from gradbox_engine.requests import Group


@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 2), (3, 2), (1, 2)],
        [(3,), (3,)],
        [(), (), ()],
        [(2, 3, 0), (2, 3, 0)],
        [(0, 2), (4, 2)],
    ],
)
def test_each_shard_finds_its_rows(shapes):
    group = Group("z", [{}] * len(shapes))
    outputs = {Position(0, i): {"": torch.randn(shape)} for i, shape in enumerate(shapes)}
    whole, num_rows = concatenated([group], outputs)
    assert whole["z"][""].shape[0] == sum(shape[0] if shape else 1 for shape in shapes)
    for position, part in ShardRows([group], num_rows).parts(whole).items():
        assert part[""].shape == outputs[position][""].shape
        assert torch.equal(part[""], outputs[position][""])
        assert part[""].untyped_storage().data_ptr() == whole["z"][""].untyped_storage().data_ptr()


def test_names_without_a_tensor_are_left_out():
    group = Group("z", [{}])
    rows = ShardRows([group], {"z": [2]})
    parts = rows.parts({"z": {"a": torch.ones(2), "b": None}})
    assert list(parts[Position(0, 0)]) == ["a"]


def test_an_order_is_undone():
    group = Group("z", [{}], order=[2, 0, 1])
    whole = {"": torch.arange(3.0)}
    assert ordered(whole, group)[""].tolist() == [2, 0, 1]
    assert torch.equal(unordered(ordered(whole, group), group)[""], whole[""])
