"""Scores of queries with the rows of a store, which goes through memory in blocks.

Shapes: Q queries, N rows, K numbers a row, n rows of a block, k of the largest.
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
    queries: Tensor, parts: Sequence[Path], *, top: int | None, unit_norm: bool
) -> Scores:
    """Return ⟨query, row⟩ for each query.

    Args:
        queries: (Q, K).
        parts: of the store.
        top: how many of the largest to return; None is all scores.
        unit_norm: whether queries and rows are scaled to norm 1 first; a row of zeros stays zero.
    """
    queries = queries.float()
    if unit_norm:
        queries = queries / _norms(queries)[:, None]
    found: list[Tensor] = []
    best = queries.new_empty(len(queries), 0)
    rows = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    for first, block in blocks_of_rows(parts, device=queries.device):
        scores = queries @ block.T
        if unit_norm:
            scores /= _norms(block)
        if top is None:
            found.append(scores)
            continue
        here = torch.arange(first, first + len(block), device=rows.device).expand_as(scores)
        both, of_both = torch.cat([best, scores], 1), torch.cat([rows, here], 1)
        best, places = both.topk(min(top, both.shape[1]))
        rows = of_both.gather(1, places)
    return Scores(torch.cat(found, 1), None) if top is None else Scores(best, rows)


def _norms(rows: Tensor) -> Tensor:
    """Return what scales rows to norm 1; a row of zeros stays zero."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.clamp_min(torch.finfo(rows.dtype).tiny)
