"""Tensors as NumPy buffers and back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gradbox_worker.cluster.buffers import (
    TensorBuffer,
    as_buffers,
    as_tensors,
    num_bytes,
)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4, dtype=torch.float64).T,
        torch.randn(5).bfloat16(),
        torch.tensor(2.5),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(5, 2)[:1, 1],
        torch.arange(4),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_a_tensor_comes_back_with_its_bits(tensor: Tensor) -> None:
    back = TensorBuffer.of(tensor).tensor(copy=True)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back, tensor)


def test_a_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.zeros(3)
    back = as_tensors(as_buffers({"x": tensor}), copy=False)["x"]
    tensor[0] = 1
    assert back[0] == 1


def test_a_tensor_that_may_be_written_to_has_memory_of_its_own() -> None:
    tensor = torch.zeros(3)
    as_tensors(as_buffers([tensor]))[0][0] = 1
    assert tensor[0] == 0


@dataclass(frozen=True)
class Holder:
    name: str
    parts: dict[str, Tensor]
    pair: tuple[Tensor, int | None]


def test_whatever_holds_tensors_is_walked() -> None:
    holder = Holder("h", {"a": torch.ones(2)}, (torch.zeros(3), None))
    buffers = as_buffers(holder)
    assert isinstance(buffers.parts["a"], TensorBuffer)
    assert num_bytes(buffers) == num_bytes(holder) == 5 * 4
    back = as_tensors(buffers)
    assert back.name == "h"
    assert torch.equal(back.pair[0], holder.pair[0])
    assert back.pair[1] is None
