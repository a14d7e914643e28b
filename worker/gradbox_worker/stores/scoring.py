"""Scores of queries with the rows of a store, which goes through memory in blocks.

Shapes: Q queries, N rows, K numbers a row, n rows of a block, k of the largest and smallest.
Cost: N K (2 Q + 1) operations and one pass over the files, and beside them one block and (Q, k) or
(Q, N) scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gradbox_worker.stores.rows import blocks_of_rows


@dataclass(frozen=True)
class Scores:
    """The scores (Q, k) and which rows they are of, largest first; or those of all rows, (Q, N)."""

    scores: Tensor
    rows: Tensor | None


def scores_of(
    queries: Tensor, parts: Sequence[Path], *, top: int | None, bottom: int = 0, unit_norm: bool
) -> Scores:
    """Return ⟨query, row⟩ for each query.

    Args:
        queries: (Q, K).
        parts: of the store.
        top: how many of the largest to return; None is all scores.
        bottom: how many of the smallest to return behind them, of rows that are not among them.
        unit_norm: whether queries and rows are scaled to norm 1 first; a row of zeros stays zero.
    """
    queries = queries.float()
    if unit_norm:
        queries = queries / _norms(queries)[:, None]
    found: list[Tensor] = []
    none = queries.new_empty(len(queries), 0)
    # The scores and rows of either end, by whether it is the one of the largest.
    ends = {largest: (none, none.long()) for largest in (True, False)}
    num_rows = 0
    for first, block in blocks_of_rows(parts, device=queries.device):
        scores = queries @ block.T
        if unit_norm:
            scores /= _norms(block)
        if top is None:
            found.append(scores)
            continue
        num_rows = first + len(block)
        here = torch.arange(first, num_rows, device=queries.device).expand_as(scores)
        for largest, count in ((True, top), (False, bottom)):
            kept, of_kept = ends[largest]
            both, of_both = torch.cat([kept, scores], 1), torch.cat([of_kept, here], 1)
            best, places = both.topk(min(count, both.shape[1]), largest=largest)
            ends[largest] = best, of_both.gather(1, places)
    if top is None:
        return Scores(torch.cat(found, 1), None)
    num_smallest = max(0, min(bottom, num_rows - top))
    smallest = (end[:, :num_smallest].flip(1) for end in ends[False])
    return Scores(*(torch.cat(both, 1) for both in zip(ends[True], smallest, strict=True)))


def _norms(rows: Tensor) -> Tensor:
    """Return what scales rows to norm 1; a row of zeros stays zero."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.clamp_min(torch.finfo(rows.dtype).tiny)
