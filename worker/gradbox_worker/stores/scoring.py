"""Scores of queries with the rows of a store, which go through memory in blocks.

Any consecutive blocks may be scored by themselves, and what they give joined: however the blocks of
a store are shared out, the result is the same to the last bit.

Shapes: Q queries, N rows, K numbers a row, n rows of a block, k of the largest and smallest.
Cost: N K (2 Q + 1) operations and one pass over the files, and beside them one block and (Q, k) or
(Q, N) scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradbox_engine import Observer
from gradbox_worker.stores.rows import RowBlock, rows_of


@dataclass(frozen=True)
class Question:
    """What is asked of all rows: ⟨query, row⟩ for each query.

    Attributes:
        queries: (Q, K), in float32.
        top: how many of the largest to return; None is all scores.
        bottom: how many of the smallest to return behind them, of rows that are not among them.
        unit_norm: whether queries and rows are scaled to norm 1 first; a row of zeros stays zero.
    """

    queries: Tensor
    top: int | None
    bottom: int = 0
    unit_norm: bool = False


@dataclass(frozen=True)
class Scores:
    """The scores (Q, k) and which rows they are of, largest first; or those of all rows, (Q, N)."""

    scores: Tensor
    rows: Tensor | None


def scores_of(question: Question, blocks: Sequence[RowBlock], observer: Observer) -> Scores:
    """Return what is asked, of the rows of consecutive blocks.

    Args:
        observer: hears of each block; may raise to stop.
    """
    # In memory that is laid out alike on every device.
    queries = question.queries.clone(memory_format=torch.contiguous_format)
    if question.unit_norm:
        queries /= _norms(queries)[:, None]
    found: list[Scores] = []
    read = rows_of(blocks, device=queries.device)
    for number, (block, rows) in enumerate(zip(blocks, read, strict=True)):
        observer.step("products", number, len(blocks))
        scores = queries @ rows.T
        if question.unit_norm:
            scores /= _norms(rows)
        if question.top is None:
            found.append(Scores(scores, None))
        else:
            ends = _ends(scores, block, question.top, question.bottom)
            found = [joined(question, [*found, ends])]
    observer.step("products", len(blocks), len(blocks))
    return joined(question, found)


def joined(question: Question, found: Sequence[Scores]) -> Scores:
    """Return what is asked, of the rows that these are of, which follow one another.

    Of equal scores that of the earlier block is the larger one.
    """
    scores = torch.cat([one.scores for one in found], 1)
    if question.top is None:
        return Scores(scores, None)
    rows = torch.cat([one.rows for one in found if one.rows is not None], 1)
    order, num_found = scores.argsort(descending=True, stable=True), scores.shape[1]
    num_smallest = max(0, min(question.bottom, num_found - question.top))
    places = torch.cat([order[:, : question.top], order[:, num_found - num_smallest :]], 1)
    return Scores(scores.gather(1, places), rows.gather(1, places))


def _ends(scores: Tensor, block: RowBlock, top: int, bottom: int) -> Scores:
    """Return those of a block (Q, n) that may be among the largest and the smallest of all rows."""
    num_largest = min(top, block.num_rows)
    largest = scores.topk(num_largest).indices
    others = scores.scatter(1, largest, torch.inf)
    smallest = others.topk(min(bottom, block.num_rows - num_largest), largest=False).indices
    places = torch.cat([largest, smallest], 1)
    return Scores(scores.gather(1, places), block.first + places)


def _norms(rows: Tensor) -> Tensor:
    """Return what scales rows to norm 1; a row of zeros stays zero."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.clamp_min(torch.finfo(rows.dtype).tiny)
