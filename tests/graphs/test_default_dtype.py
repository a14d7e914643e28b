"""A default dtype of the author's own, which the box lacks, is said in the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from gradbox.tracing.trace import trace
from gradbox_worker.interpreting.build import build


@pytest.fixture(autouse=True)
def _default_of_the_author() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "make",
    [
        lambda z: torch.ones(3),
        lambda z: torch.arange(0, 1, 0.25),
        lambda z: torch.arange(0, z.shape[0], step=0.5),
        lambda z: torch.hann_window(3),
        lambda z: torch.kaiser_window(3),
        lambda z: torch.fft.fftfreq(3),
        lambda z: torch.fft.rfftfreq(3),
        lambda z: torch.full((3,), 0.1),
        lambda z: torch.full((3,), 2),
    ],
)
def test_a_call_without_a_dtype_has_the_author_s(make: Callable[[Tensor], Tensor]) -> None:
    z = torch.ones(3)
    expected = make(z)
    traced = trace(make, positional=1)
    torch.set_default_dtype(torch.float32)  # as on the box
    found = build(traced.graph, traced.tensors, device="cpu")(z)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda z: torch.ones(3, dtype=z.dtype),
        lambda z: torch.arange(3),
        lambda z: torch.arange(z.shape[0]),
        lambda z: torch.arange(0, 1, 0.25, dtype=torch.float64),
        lambda z: torch.hann_window(3, dtype=torch.float64),
        lambda z: torch.where(z > 0, z, 0.0),
        lambda z: torch.tensor([1.0, 2.0, 3.0]),
    ],
)
def test_a_call_whose_dtype_is_said_is_traced(make: Callable[[Tensor], Tensor]) -> None:
    trace(lambda z: (z + make(z)).sum(), positional=1)
