"""What kept graphs take, by the allocator's own numbers."""

from __future__ import annotations

import gc

import pytest
import torch

from gradbox_engine import Group, Objective, set_gradient, set_outputs
from gradbox_engine.replay.retention import HELD_FACTOR
from proofs.cuda.models import GRAPH_BYTES, MIB, Wide, shards
from tests.cuda.test_out_of_memory import room_for
from tests.device import DEVICE, on_cuda_alone

pytestmark = on_cuda_alone

NUM_SHARDS = 8
SLACK = 4 * MIB  # arguments, outputs, the allocator's rounding


class Allocated:
    """Bytes that are allocated before each shard of the first pass, and behind the last."""

    def __init__(self) -> None:
        self.by_shard: list[int] = []

    def step(self, phase: str, done: int, total: int) -> None:
        if phase == "forward":
            self.by_shard.append(torch.cuda.memory_allocated(DEVICE))


@pytest.mark.parametrize("kept", [0, 2, 5])
def test_a_budget_holds_as_many_graphs_as_it_has_room_for(kept: int) -> None:
    model, groups = Wide().to(DEVICE), [Group("z", shards(NUM_SHARDS))]
    set_gradient(model, groups, Objective(torch.var))
    allocated = Allocated()
    retain = round((kept + 0.5) * HELD_FACTOR * GRAPH_BYTES) if kept else 0
    result = set_gradient(model, groups, Objective(torch.var), retain=retain, observer=allocated)
    assert (result.retained, result.replayed) == (kept + 1, NUM_SHARDS - kept - 1)
    begin = allocated.by_shard[0]
    held = [bytes_ - begin for bytes_ in allocated.by_shard]
    # One graph a shard while there is room, then none; the last shard's in any case.
    expected = [min(done, kept) * GRAPH_BYTES for done in range(NUM_SHARDS)]
    expected.append((kept + 1) * GRAPH_BYTES)
    assert held == pytest.approx(expected, abs=SLACK)


def test_all_is_freed_afterwards_but_the_gradients() -> None:
    model, groups = Wide().to(DEVICE), [Group("z", shards(NUM_SHARDS))]
    gc.collect()
    before = torch.cuda.memory_allocated(DEVICE)
    result = set_gradient(model, groups, Objective(torch.var), retain="auto")
    assert result.replayed == 0
    left = torch.cuda.memory_allocated(DEVICE) - before
    # cuBLAS keeps a workspace, made by whoever multiplies first.
    assert left <= result.grads["weight"].nbytes + 64 * MIB
    del result
    gc.collect()
    assert torch.cuda.memory_allocated(DEVICE) - before <= 64 * MIB


def test_auto_keeps_to_the_limit_that_a_job_has() -> None:
    model, groups = Wide().to(DEVICE), [Group("z", shards(NUM_SHARDS))]
    set_gradient(model, groups, Objective(torch.var))
    with room_for(560 * MIB):
        before = torch.cuda.memory_stats(DEVICE)["num_ooms"]
        result = set_gradient(model, groups, Objective(torch.var), retain="auto")
        num_ooms = torch.cuda.memory_stats(DEVICE)["num_ooms"] - before
    assert 1 < result.retained < NUM_SHARDS
    assert num_ooms == 0


def test_graphs_that_outlive_the_job_are_counted_as_the_allocator_counts_them() -> None:
    model, groups = Wide().to(DEVICE), [Group("z", shards(NUM_SHARDS))]
    set_outputs(model, groups)
    gc.collect()
    before = torch.cuda.memory_allocated(DEVICE)
    kept = set_outputs(model, groups, retain=10**12).kept
    assert kept is not None
    held = torch.cuda.memory_allocated(DEVICE) - before
    assert kept.num_bytes / HELD_FACTOR == pytest.approx(held, abs=2 * SLACK)
    kept.free()
    gc.collect()
    assert torch.cuda.memory_allocated(DEVICE) - before <= 2 * SLACK
