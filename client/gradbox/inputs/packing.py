"""Shards of about equal cost from samples of different lengths.

A shard is padded to its longest sample, so samples of about the same length belong together. `pack`
sorts the samples by length, trims the padding that is then not needed, and cuts where a shard
would hold more than `tokens` entries of (samples × padded length). `order` says how to put the
outputs back: a job that is given it computes the loss on the samples as they came.

    packed = pack(tokenizer(texts, padding=True, return_tensors="pt"), tokens=4096)
    Gradient(..., inputs=packed.shards, order=packed.order)

Cost is taken to be proportional to entries. Attention costs more for long samples, which this does
not weigh. Only padding on the right is trimmed: on the left it would move every position.

Legend: N samples, T positions, b samples of a shard, t positions that a shard keeps.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from gradbox.errors import InvalidInputs
from gradbox.tensors.tensor_bytes import Tensor, is_tensor, tensor_bytes

MASK = "attention_mask"


@dataclass(frozen=True)
class Packed:
    """Shards, and the permutation that puts their outputs into the samples' own order.

    Attributes:
        shards: {argument: tensor} each, as `inputs=` of a computation takes them.
        order: (N,) int64, as its `order=` takes it: Z = cat(outputs of the shards)[order] has
            sample i in row i.
    """

    shards: list[dict[str, Any]]
    order: np.ndarray[Any, Any]  # (N,), int64


def pack(
    inputs: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
    *,
    tokens: int,
    mask: str = MASK,
) -> Packed:
    """Cut samples into shards of at most `tokens` entries each, the longest samples first.

        packed = pack(tokenizer(texts, padding=True, return_tensors="pt"), tokens=4096)
        Gradient(..., inputs=packed.shards, order=packed.order)

    A sample that is longer than `tokens` is a shard of its own. Within one length samples keep
    their order, so the same inputs always give the same shards. Padding is trimmed on the right.

    Args:
        inputs: arguments of the model over all samples, torch tensors or NumPy arrays with N along
            dim 0; those that also have T along dim 1 are trimmed. Or shards of such arguments,
            each padded to a length of its own, which are taken apart and packed anew.
        tokens: entries of a shard, samples × padded length.
        mask: the argument of shape (N, T) that is not zero where a position counts.

    Raises:
        InvalidInputs: `tokens` is no whole number of 1 or more, there are no samples, there is no
            mask of that name and shape, the arguments of a part differ in N, or the parts differ in
            their arguments.
    """
    limit = _whole(tokens)
    parts = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    for part in parts:
        if not isinstance(part, Mapping):
            raise InvalidInputs(
                f"pack: expected {{argument: tensor}} over all samples, as a tokenizer gives it, "
                f"or a list of such, got {type(part).__name__}"
            )
    lengths = [_lengths(part, mask, place) for place, part in enumerate(parts)]
    _check_same_arguments(parts)
    lengths_N = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int64)
    if lengths_N.size == 0:
        raise InvalidInputs("pack: expected one sample or more, got none")
    by_length_N = np.argsort(-lengths_N, kind="stable")
    cuts = _cuts(lengths_N[by_length_N], limit)
    starts = np.cumsum([0, *(len(part) for part in lengths)])
    shards = [
        _shard(parts, mask, starts, by_length_N[start:stop], int(lengths_N[by_length_N[start]]))
        for start, stop in pairwise(cuts)
    ]
    return Packed(shards, np.argsort(by_length_N, kind="stable"))


def _whole(tokens: Any) -> int:
    try:
        limit = 0 if isinstance(tokens, bool) else operator.index(tokens)
    except TypeError:
        limit = 0
    if limit < 1:
        raise InvalidInputs(
            f"pack: expected tokens to be a whole number, 1 or more, got {tokens!r}"
        )
    return limit


def _lengths(part: Mapping[str, Any], mask: str, place: int) -> np.ndarray[Any, Any]:
    """Return how many positions each sample needs: up to its last that counts, at least one."""
    sizes = {name: tuple(value.shape) for name, value in part.items() if is_tensor(value)}
    if len(sizes) < len(part) or len(sizes.get(mask, ())) != 2:
        raise InvalidInputs(
            f"pack: expected tensors, {mask!r} of shape (samples, positions) among them, got "
            f"{ {name: sizes.get(name, type(value).__name__) for name, value in part.items()} } "
            f"in part {place}; name another mask by mask="
        )
    if len({shape[:1] for shape in sizes.values()}) != 1:
        raise InvalidInputs(
            f"pack: expected as many samples in every argument, got {sizes} in part {place}"
        )
    counts_NT = _counts(part[mask], f"pack: {mask!r} of part {place}")
    positions = np.arange(1, counts_NT.shape[1] + 1)
    longest: np.ndarray[Any, Any] = (counts_NT * positions).max(axis=1, initial=1)
    return longest


def _counts(mask: Any, where: str) -> np.ndarray[Any, Any]:
    """Return where a mask is not zero, (N, T)."""
    tensor_bytes(mask, where=where)  # whatever can be sent can be read
    counts = mask != 0 if isinstance(mask, np.ndarray) else (mask.detach() != 0).cpu().numpy()
    return np.asarray(counts)


def _check_same_arguments(parts: Sequence[Mapping[str, Any]]) -> None:
    for place, part in enumerate(parts):
        if part.keys() != parts[0].keys():
            raise InvalidInputs(
                f"pack: expected the arguments {sorted(parts[0])} of part 0 in every part, got "
                f"{sorted(part)} in part {place}; give each part the same ones, or pack them apart"
            )


def _cuts(lengths: np.ndarray[Any, Any], tokens: int) -> list[int]:
    """Return where shards begin and end in samples of falling length."""
    cuts = [0]
    for index in range(1, len(lengths)):
        if (index - cuts[-1] + 1) * int(lengths[cuts[-1]]) > tokens:
            cuts.append(index)
    return [*cuts, len(lengths)]


def _shard(
    parts: Sequence[Mapping[str, Any]],
    mask: str,
    starts: np.ndarray[Any, Any],
    samples_b: np.ndarray[Any, Any],
    length: int,
) -> dict[str, Any]:
    part_b = np.searchsorted(starts, samples_b, side="right") - 1
    places = list(zip(part_b.tolist(), (samples_b - starts[part_b]).tolist(), strict=True))
    return {
        name: _stacked(name, [_row(parts[part], mask, name, row, length) for part, row in places])
        for name in parts[0]
    }


def _row(part: Mapping[str, Any], mask: str, name: str, row: int, length: int) -> Any:
    """Return one sample of one argument, with t positions if it has positions."""
    value, num_positions = part[name], part[mask].shape[1]
    if value.ndim < 2 or value.shape[1] != num_positions:
        return value[row]
    if length <= num_positions:
        return value[row, :length]
    return _padded(value[row], length)


def _padded(row: Any, length: int) -> Any:
    """Return a sample with zeros up to t positions: its shard holds one from a longer part."""
    padding = [(0, length - row.shape[0])] + [(0, 0)] * (row.ndim - 1)
    if isinstance(row, np.ndarray):
        return np.pad(row, padding)
    filled = row.new_zeros((length, *row.shape[1:]))
    filled[: row.shape[0]] = row
    return filled


def _stacked(name: str, rows: Sequence[Any]) -> Any:
    forms = {(isinstance(row, np.ndarray | np.generic), tuple(row.shape)) for row in rows}
    if len(forms) > 1:
        raise InvalidInputs(
            f"pack: argument {name!r}: expected samples of one kind and shape, got "
            f"{', '.join(sorted({_form(row) for row in rows}))}; convert them, or pack them apart"
        )
    if isinstance(rows[0], np.ndarray | np.generic):
        return np.stack(rows)
    from torch import stack

    return stack(list(rows))


def _form(row: Any) -> str:
    kind = "arrays" if isinstance(row, np.ndarray | np.generic) else "tensors"
    return f"{kind} of shape {tuple(row.shape)}"
