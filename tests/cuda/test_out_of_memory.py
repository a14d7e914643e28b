"""Where memory runs out: the right gradient, or a clear error, and nothing that stays held.

The limit is the allocator's fraction of the device, so that a device of any size runs out. A shard
of `Wide` takes four times its graph at the peak, 256 MiB.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from gradbox_engine import (
    Group,
    Objective,
    SetGradient,
    gradient_at_cotangents,
    set_gradient,
    set_outputs,
)
from proofs.cuda.models import GRAPH_BYTES, MIB, Wide, shards
from tests.device import DEVICE, on_cuda_alone, same_bits
from tests.engine.replay.halves import first_outputs

pytestmark = on_cuda_alone

NUM_SHARDS = 8
EVERYTHING = 10**13
FIVE = round(5.5 * 1.3 * GRAPH_BYTES)


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Leave the allocator so many bytes beyond what is allocated now."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    most = torch.cuda.memory_allocated(DEVICE) + num_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), DEVICE)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
        torch.cuda.empty_cache()


def gradient(model: Wide, *, retain: int, loss=torch.var) -> SetGradient:
    return set_gradient(model, [Group("z", shards(NUM_SHARDS))], Objective(loss), retain=retain)


def greedy(z: Tensor) -> Tensor:
    """The variance, with 400 MiB on the side."""
    room = torch.zeros(400 * MIB, dtype=torch.uint8, device=z.device)
    return z.var() + room[0]


def assert_same(found: SetGradient, expected: SetGradient) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert same_bits(found.grads["weight"], expected.grads["weight"])


def test_in_the_first_pass_kept_graphs_give_way() -> None:
    model = Wide().to(DEVICE)
    expected = gradient(model, retain=0)
    with room_for(512 * MIB):
        found = gradient(model, retain=EVERYTHING)
    assert (found.retained, found.replayed) == (1, NUM_SHARDS - 1)
    assert_same(found, expected)


def test_in_the_loss_kept_graphs_give_way() -> None:
    model = Wide().to(DEVICE)
    expected = gradient(model, retain=0, loss=greedy)
    with room_for(640 * MIB):
        found = gradient(model, retain=FIVE, loss=greedy)
    assert found.replayed == NUM_SHARDS
    assert_same(found, expected)


def test_in_the_backward_pass_kept_graphs_give_way() -> None:
    model = Wide(backward_bytes=300 * MIB).to(DEVICE)
    expected = gradient(model, retain=0)
    with room_for(640 * MIB):
        found = gradient(model, retain=FIVE)
    assert found.replayed == NUM_SHARDS
    assert_same(found, expected)


def test_graphs_kept_between_the_halves_give_way() -> None:
    model = Wide(backward_bytes=300 * MIB).to(DEVICE)
    groups = [Group("z", shards(NUM_SHARDS))]
    expected = gradient(model, retain=0)
    with room_for(640 * MIB):
        half = set_outputs(model, groups, retain=FIVE)
        assert half.kept is not None
        z = first_outputs(half).outputs["z"][""].detach().requires_grad_()
        z.var().backward()
        found = gradient_at_cotangents(model, groups, {"z": {"": z.grad}}, half.kept)
    assert found.replayed == NUM_SHARDS
    assert same_bits(found.grads["weight"], expected.grads["weight"])


@pytest.mark.parametrize("room_mib", [32, 100])
def test_a_shard_that_does_not_fit_is_an_error_that_leaves_nothing(room_mib: int) -> None:
    model = Wide().to(DEVICE)
    gradient(model, retain=0)
    gc.collect()
    before = torch.cuda.memory_allocated(DEVICE)
    with room_for(room_mib * MIB), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        gradient(model, retain=EVERYTHING)
    gc.collect()
    assert torch.cuda.memory_allocated(DEVICE) == before
    assert gradient(model, retain=0).replayed == NUM_SHARDS - 1


def test_a_result_that_does_not_fit_is_an_error_that_leaves_nothing() -> None:
    """The gradients of 64 unreached parameters are zeros that are made at the end."""
    model = Wide()
    for index in range(64):
        model.register_parameter(f"unused{index}", torch.nn.Parameter(torch.zeros(4 * MIB)))
    model.to(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    with room_for(640 * MIB), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        gradient(model, retain=0)
    gc.collect()
    assert torch.cuda.memory_allocated(DEVICE) == before
