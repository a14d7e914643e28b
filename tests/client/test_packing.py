"""Packing samples by length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbox.errors import InvalidInputs
from gradbox.inputs.packing import pack

LENGTHS = [3, 9, 1, 4, 4, 2, 9, 5]


def _inputs(lengths: list[int], width: int = 10) -> dict[str, torch.Tensor]:
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    tokens = (torch.arange(1, len(lengths) + 1)[:, None] * 100 + torch.arange(width)) * mask
    return {"input_ids": tokens, "attention_mask": mask.long(), "label": torch.arange(len(lengths))}


def _rows(shards: list[dict]) -> list[tuple]:
    """Every sample's label and the tokens that count."""
    return [
        (int(label), tuple(int(t) for t in tokens if t))
        for shard in shards
        for label, tokens in zip(shard["label"], shard["input_ids"], strict=True)
    ]


def test_samples_of_one_length_share_a_shard_without_padding():
    packed = pack(_inputs(LENGTHS), tokens=18)
    shapes = [tuple(shard["input_ids"].shape) for shard in packed.shards]
    assert shapes == [(2, 9), (3, 5), (3, 3)]


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=40),
    tokens=st.integers(1, 60),
)
@settings(max_examples=50, deadline=None)
def test_nothing_is_lost_and_order_puts_it_back(lengths, tokens):
    inputs = _inputs(lengths, width=12)
    packed = pack(inputs, tokens=tokens)
    rows = _rows(packed.shards)
    assert [rows[place] for place in packed.order] == _rows([inputs])
    for shard in packed.shards:
        num_samples, length = shard["input_ids"].shape
        assert num_samples * length <= tokens or num_samples == 1
        assert shard["attention_mask"][0].all()


def test_shards_of_their_own_length_are_packed_anew():
    parts = [_inputs([3, 2], width=3), _inputs([7, 1, 3], width=8)]
    parts[1]["label"] += 2
    packed = pack(parts, tokens=9)
    rows = _rows(packed.shards)
    assert [rows[place] for place in packed.order] == _rows(parts)
    shapes = [tuple(shard["input_ids"].shape) for shard in packed.shards]
    assert shapes == [(1, 7), (3, 3), (1, 1)]


def test_numpy_arrays_stay_numpy_arrays():
    inputs = {name: tensor.numpy() for name, tensor in _inputs(LENGTHS).items()}
    packed = pack(inputs, tokens=18)
    expected = pack(_inputs(LENGTHS), tokens=18)
    assert packed.order.tolist() == expected.order.tolist()
    for ours, theirs in zip(packed.shards, expected.shards, strict=True):
        assert all(np.array_equal(ours[name], theirs[name].numpy()) for name in theirs)


def test_padding_on_the_left_is_not_trimmed():
    mask = torch.tensor([[0, 0, 1], [0, 1, 1]])
    packed = pack({"attention_mask": mask}, tokens=3)
    assert [tuple(shard["attention_mask"].shape) for shard in packed.shards] == [(1, 3), (1, 3)]


_MORE = _inputs(LENGTHS)
_LESS = {name: tensor for name, tensor in _MORE.items() if name != "label"}
_ARRAYS = {name: tensor.numpy() for name, tensor in _MORE.items()}


def _masked(change):
    inputs = _inputs(LENGTHS)
    return inputs | {"attention_mask": change(inputs["attention_mask"])}


@pytest.mark.parametrize(
    "change",
    [torch.Tensor.bfloat16, lambda mask: mask.float().requires_grad_(), torch.Tensor.bool],
    ids=["bfloat16", "requires grad", "bool"],
)
def test_a_mask_is_of_any_dtype(change):
    packed, expected = (pack(inputs, tokens=24) for inputs in (_masked(change), _inputs(LENGTHS)))
    assert [len(s["input_ids"]) for s in packed.shards] == [
        len(s["input_ids"]) for s in expected.shards
    ]
    assert (packed.order == expected.order).all()


@pytest.mark.parametrize(
    ("inputs", "terms", "message"),
    [
        (_inputs(LENGTHS), {"tokens": 0}, "1 or more"),
        (_inputs(LENGTHS), {"tokens": 9.5}, r"whole number, 1 or more, got 9\.5"),
        (_inputs(LENGTHS), {"tokens": "9"}, "whole number, 1 or more, got '9'"),
        (_inputs(LENGTHS), {"tokens": True}, "whole number, 1 or more, got True"),
        (_masked(lambda mask: mask.to("meta")), {"tokens": 9}, "'attention_mask' .*meta device"),
        (_masked(torch.Tensor.to_sparse), {"tokens": 9}, r"'attention_mask' .*to_dense\(\)"),
        ([_MORE, _ARRAYS], {"tokens": 99}, "'input_ids'.*one kind .*arrays of .*tensors of"),
        (_inputs(LENGTHS), {"tokens": 9, "mask": "mask"}, "name another mask"),
        (_inputs(LENGTHS) | {"label": torch.ones(3)}, {"tokens": 9}, "as many samples"),
        (_inputs(LENGTHS) | {"label": [1] * 8}, {"tokens": 9}, "expected tensors"),
        ([], {"tokens": 9}, "one sample or more"),
        (torch.ones(3, 4), {"tokens": 9}, r"pack: expected {argument: tensor} .*got Tensor"),
        (
            [_MORE, _LESS],
            {"tokens": 9},
            r"'label'\] of part 0 in every part, got .*'input_ids'\] in",
        ),
        (
            [_LESS, _MORE],
            {"tokens": 9},
            r"'input_ids'\] of part 0 in every part, got .*'label'\] in",
        ),
    ],
)
def test_what_cannot_be_packed(inputs, terms, message):
    with pytest.raises(InvalidInputs, match=message):
        pack(inputs, **terms)
