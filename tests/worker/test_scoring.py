"""Scores of a store's rows: the same, however its blocks are shared out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gradbox import PerSampleGradient
from gradbox_engine.errors import DeviceLost
from gradbox_engine.requests import Silent
from gradbox_worker.cluster.leading import Lead, WaitingGraphs
from gradbox_worker.stores import rows as store_rows
from gradbox_worker.stores.rows import ROWS, RowBlock, blocks_of
from gradbox_worker.stores.scoring import Question, Scores, joined, scores_of
from tests.cluster.test_led_device import work_of

K = 6
SIZES = (5, 1, 9, 4)
NUM_ROWS = sum(SIZES)


def whole_numbers(*shape: int, seed: int) -> Tensor:
    """Return numbers whose products are exact, and often equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


QUERIES, STORED = whole_numbers(3, K, seed=1), whole_numbers(NUM_ROWS, K, seed=2)


@pytest.fixture
def blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RowBlock]:
    """Blocks of four rows at most, of a store of several parts."""
    monkeypatch.setattr(store_rows, "BLOCK_BYTES", 4 * K * 4)
    parts = [tmp_path / f"{number}.safetensors" for number in range(len(SIZES))]
    for part, rows in zip(parts, STORED.split(SIZES), strict=True):
        save_file({ROWS: rows.half()}, part)
    found = blocks_of(parts)
    assert [block.first for block in found] == [0, 4, 5, 6, 10, 14, 15]
    return found


def shared_out(question: Question, blocks: Sequence[RowBlock], *cuts: int) -> Scores:
    ends = [0, *cuts, len(blocks)]
    ranges = [blocks[a:b] for a, b in pairwise(ends)]
    return joined(question, [scores_of(question, own, Silent()) for own in ranges])


@pytest.mark.parametrize("unit_norm", [False, True])
@pytest.mark.parametrize(
    ("top", "bottom"), [(1, 0), (3, 2), (2, 7), (12, 3), (15, 9), (NUM_ROWS, 0), (99, 99)]
)
def test_the_largest_and_smallest_are_those_of_all_rows(
    blocks: list[RowBlock], top: int, bottom: int, unit_norm: bool
) -> None:
    question = Question(QUERIES, top, bottom, unit_norm)
    every = shared_out(Question(QUERIES, None, 0, unit_norm), blocks).scores
    ordered = every.sort(descending=True).values
    num_smallest = max(0, min(bottom, NUM_ROWS - top))
    expected = torch.cat([ordered[:, :top], ordered[:, NUM_ROWS - num_smallest :]], 1)
    one = shared_out(question, blocks)
    assert one.rows is not None
    assert torch.equal(one.scores, expected)
    assert torch.equal(every.gather(1, one.rows), expected)
    assert all(len(set(rows)) == len(rows) for rows in one.rows.tolist())  # each row once
    for cuts in ([1], [3], [2, 5], range(1, len(blocks))):
        several = shared_out(question, blocks, *cuts)
        assert several.rows is not None
        assert torch.equal(several.scores, one.scores)
        assert torch.equal(several.rows, one.rows)  # of equal scores, too


def test_all_scores_are_products_in_the_order_of_rows(blocks: list[RowBlock]) -> None:
    question = Question(QUERIES, None)
    for cuts in ([], [3], [2, 5]):
        found = shared_out(question, blocks, *cuts)
        assert torch.equal(found.scores, QUERIES @ STORED.T)
        assert found.rows is None


class Stopping:
    def step(self, phase: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt


def test_a_query_stops_between_two_blocks(blocks: list[RowBlock]) -> None:
    with pytest.raises(KeyboardInterrupt):
        scores_of(Question(QUERIES, 1), blocks, Stopping())


class Helping:
    """A device that scores, or dies of it; in place of `OpenHelper`."""

    def __init__(self, lead: Lead, *, sees_files: bool, dies: bool) -> None:
        self.name, self.sees_files = "other", sees_files
        self.scored: list[RowBlock] = []
        self._lead, self._dies = lead, dies

    def share(self, value: Any) -> Any:
        return value

    def moved(self, kind: str, value: Any) -> Any:
        return value

    def call(self, method: str, question: Question, blocks: Any, *, then: Any) -> Future[Any]:
        assert method == "scored"
        future: Future[Any] = Future()
        if self._dies:
            self._lead.helpers.alive.remove(self)  # type: ignore[arg-type]
            future.set_exception(DeviceLost("other"))
            return future
        self.scored += blocks
        future.set_result(then(scores_of(question, blocks, Silent())))
        return future


@pytest.mark.parametrize(
    ("sees_files", "dies", "num_blocks"), [(True, False, 4), (True, True, 0), (False, False, 0)]
)
def test_a_leader_shares_the_blocks_out_to_those_that_see_the_files_and_live(
    blocks: list[RowBlock], tmp_path: Path, sees_files: bool, dies: bool, num_blocks: int
) -> None:
    job = PerSampleGradient(model="mlp", inputs=[torch.ones(2, 5)], loss=lambda z: z.sum(1))
    lead = Lead(work_of(job, tmp_path), [], own_name="own", waiting=WaitingGraphs(), shipped=None)
    observer = lead.watched(Silent())
    ranges = SimpleNamespace(scored=lambda *given: scores_of(*given, observer))
    lead.helpers.lead(ranges, torch.device("cpu"))
    helping = Helping(lead, sees_files=sees_files, dies=dies)
    lead.helpers.alive = [helping]  # type: ignore[list-item]
    question = Question(QUERIES, 4, 3)
    found, expected = lead.scored(question, blocks, observer), shared_out(question, blocks)
    assert torch.equal(found.scores, expected.scores)
    assert torch.equal(found.rows, expected.rows)
    assert helping.scored == blocks[:num_blocks]
