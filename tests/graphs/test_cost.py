"""The meter counts what a function allocates, and stops it before it allocates too much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbox import losses
from gradbox.errors import GraphRefused
from gradbox_worker.interpreting import memory_meter
from gradbox_worker.interpreting.memory_meter import Meter, metered

Z = torch.arange(24, dtype=torch.float64).reshape(6, 4)
MASK = Z > 10
COLUMNS = torch.tensor([0, 3, 1, 1])
EIGHT = 8  # bytes of a float64


def spent(function: Callable[[Tensor], Any]) -> int:
    with Meter(budget_bytes=2**30) as meter:
        function(Z)
    return meter.spent_bytes


@pytest.mark.parametrize(
    ("function", "num_bytes"),
    [
        (lambda z: z @ z.T, 36 * EIGHT),
        (lambda z: z.T[1:].unsqueeze(0), 0),
        (lambda z: z.sort(dim=0), 24 * EIGHT * 2),
        (lambda z: z.split(2), 0),
        (lambda z: z.exp().add_(1), 24 * EIGHT),
        (lambda z: z[MASK], 13 * EIGHT),
        (lambda z: torch.masked_select(z, MASK), 13 * EIGHT),
        (lambda z: z[MASK[:, 3], COLUMNS], 4 * EIGHT),
        (lambda z: z[None][:, MASK[:, 3]], 4 * 4 * EIGHT),
        (lambda z: z.view(2, 3, 4, 1)[MASK.view(2, 3, 4)[..., 3], :, 0], 4 * 4 * EIGHT),
        (lambda z: MASK.nonzero(), 13 * 2 * EIGHT),
        (lambda z: torch.eye(3, dtype=z.dtype), 9 * EIGHT),
    ],
)
def test_new_tensors_count_and_views_do_not(
    function: Callable[[Tensor], Any], num_bytes: int
) -> None:
    assert spent(function) == num_bytes


@pytest.mark.parametrize(
    "function",
    [
        lambda z: (z[:1] * z[:, :1]).sum(),
        lambda z: torch.where(z > 0, z, 0).amax(dim=1, keepdim=True).float(),
        lambda z: torch.std_mean(torch.frexp(z)[0], dim=0),
        lambda z: torch.stack(list(z.max(dim=1))).mean(),
        lambda z: z[:0].sum() + z[:0].exp().sum(),
    ],
)
def test_calls_that_are_bounded_by_their_entries_count_as_foreseen(
    function: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = spent(function)
    monkeypatch.setattr(memory_meter, "_BY_ENTRY", set())
    assert bounded == spent(function) > 0


def test_a_function_within_its_budget_computes_as_before() -> None:
    z = Z.clone().requires_grad_()
    expected = losses.info_nce(z)
    got = metered(losses.info_nce, budget_bytes=2**20)(z)
    assert torch.equal(got, expected)
    left, right = torch.autograd.grad(got, z), torch.autograd.grad(expected, z)
    assert torch.equal(left[0], right[0])


def test_a_function_beyond_its_budget_stops_before_it_allocates() -> None:
    z = torch.zeros(2000, 2)
    labels = torch.arange(2000) % 2
    with pytest.raises(GraphRefused, match="GiB are allowed"):
        metered(losses.triplet_all, budget_bytes=2**28)(z, labels)


@pytest.mark.parametrize(
    "index",
    [
        lambda mask, labels: (mask, labels),
        lambda mask, labels: (labels, mask[:10]),
        lambda mask, labels: (mask[:, None] & mask[:10], None),
    ],
)
def test_what_a_mask_and_labels_pick_is_foreseen(
    index: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
) -> None:
    logits = torch.zeros(4000, 10, 2)
    mask = torch.arange(4000) % 10 == 0
    chosen = index(mask, torch.arange(400) % 10)
    expected = logits[chosen]
    function = metered(lambda z: z[chosen], budget_bytes=expected.nbytes)
    assert torch.equal(function(logits), expected)
    with pytest.raises(GraphRefused):
        metered(lambda z: z[chosen], budget_bytes=expected.nbytes - 1)(logits)


def test_the_sum_over_many_small_tensors_counts() -> None:
    def loss(z: Tensor) -> Tensor:
        for _ in range(100):
            z = z + 1
        return z.sum()

    with pytest.raises(GraphRefused):
        metered(loss, budget_bytes=50 * Z.numel() * EIGHT)(Z)
