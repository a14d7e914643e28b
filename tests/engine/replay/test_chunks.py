"""Z is there once: shards write their rows where they stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradbox_engine.replay.chunks import Chunks, joined


def _written(parts: list[Tensor]) -> list[Tensor]:
    chunks = Chunks({0: len(parts)})
    return [chunks.write(0, {"": part})[""] for part in parts]


def _shares(whole: Tensor, parts: list[Tensor]) -> bool:
    addresses = {part.untyped_storage().data_ptr() for part in parts}
    return addresses == {whole.untyped_storage().data_ptr()}


@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 2), (3, 2), (1, 2)],
        [(3,), (3,)],
        [(), (), ()],
        [(2, 3, 0), (2, 3, 0)],
        [(4, 2)],
    ],
)
def test_rows_that_fit_are_not_copied_again(shapes):
    parts = [torch.randn(shape, requires_grad=True) for shape in shapes]
    written = _written(parts)
    whole = joined(written)
    rows = [part.detach().unsqueeze(0) if part.ndim == 0 else part.detach() for part in parts]
    assert torch.equal(whole, torch.cat(rows))
    assert _shares(whole, written)
    for part, copy in zip(parts, written, strict=True):
        assert copy.shape == part.shape
        assert not copy.requires_grad
        assert copy.data_ptr() != part.data_ptr() or not part.numel()


def test_shards_larger_than_the_first_are_put_together():
    parts = [torch.randn(rows, 2) for rows in (1, 5, 5, 2, 9)]
    assert torch.equal(joined(_written(parts)), torch.cat(parts))


def test_no_rows_at_first():
    parts = [torch.randn(0, 2), torch.randn(3, 2), torch.randn(0, 2), torch.randn(3, 2)]
    assert torch.equal(joined(_written(parts)), torch.cat(parts))


def test_groups_and_names_have_memory_of_their_own():
    chunks = Chunks({0: 2, 1: 2})
    wholes = {}
    for _ in range(2):
        for group in (0, 1):
            for name, z in chunks.write(group, {"a": torch.randn(2), "b": torch.randn(2)}).items():
                wholes.setdefault((group, name), []).append(z)
    assert len({joined(parts).data_ptr() for parts in wholes.values()}) == 4


def test_a_transposed_output_keeps_its_values():
    parts = [torch.randn(4, 3).T for _ in range(2)]
    assert torch.equal(joined(_written(parts)), torch.cat(parts))


def test_rows_with_others_between_them_are_copied():
    whole = torch.randn(6, 2)
    assert torch.equal(joined([whole[:2], whole[4:]]), torch.cat([whole[:2], whole[4:]]))
    assert torch.equal(joined([whole[4:], whole[:2]]), torch.cat([whole[4:], whole[:2]]))
