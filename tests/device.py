"""The device that the suite computes on, and how near its results have to be.

GRADBOX_TEST_DEVICE is cpu, the default, or cuda: the first CUDA device that is visible. The tables
of problems keep their data on the host, from where the engine and a box take it; what answers them
naively brings it to DEVICE.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch
from torch import Tensor

VARIABLE: Final = "GRADBOX_TEST_DEVICE"


def _device() -> torch.device:
    name = os.environ.get(VARIABLE) or "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"{VARIABLE}: expected cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{VARIABLE}: expected a CUDA device, torch {torch.__version__} sees none")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


DEVICE: Final = _device()
ON_CUDA: Final = DEVICE.type == "cuda"

on_cpu_alone = pytest.mark.skipif(ON_CUDA, reason=f"of the CPU's kernels, and {VARIABLE}={DEVICE}")
on_cuda_alone = pytest.mark.skipif(not ON_CUDA, reason=f"needs {VARIABLE}=cuda")

TOLERANCES: Final[Mapping[tuple[torch.dtype, str], float]] = {
    (torch.float64, "cpu"): 1e-10,
    (torch.float64, "cuda"): 1e-9,
    (torch.float32, "cpu"): 1e-4,
    (torch.float32, "cuda"): 1e-4,
}
"""Largest ‖a − b‖ / ‖b‖ between two ways to add up the same gradient. On CUDA products of other
sizes take other kernels, and some kernels add in no fixed order."""

AGAINST_FP64: Final[Mapping[str, Mapping[str, float]]] = {
    "cpu": {"fp32": 1e-5, "tf32": 1e-5, "bf16": 6e-2, "fp16": 6e-3},
    "cuda": {"fp32": 1e-5, "tf32": 1e-2, "bf16": 6e-2, "fp16": 6e-3},
}
"""By precision: largest relative difference of a gradient from that in float64; on a CPU tf32 is
float32. TensorFloat-32 has float16's digits."""

REPLAYED: Final = 1e-12 if ON_CUDA else 0.0
"""Largest relative difference of a replay in float64 from its first pass."""


def tolerance(dtype: torch.dtype) -> float:
    """Return how near two sums of gradients in this dtype have to be on DEVICE."""
    return TOLERANCES[dtype, DEVICE.type]


def moved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with their tensors on DEVICE."""
    return {
        name: value.to(DEVICE) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are the same: to the last bit on a CPU, on CUDA but for rounding.

    There the order in which some kernels add changes from call to call.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if torch.equal(a, b):
        return True
    if not ON_CUDA or not a.is_floating_point():
        return False
    near = 1e-3 if a.dtype.itemsize < 4 else 256 * torch.finfo(a.dtype).eps
    scale = b.double().nan_to_num().abs().amax()
    return torch.allclose(a.double(), b.double(), rtol=0, atol=near * float(scale), equal_nan=True)


@contextmanager
def native_recurrence() -> Iterator[None]:
    """Switch cuDNN off, for naive code with recurrent layers.

    cuDNN's have no backward pass in eval mode, and their dropout ignores torch's generators.
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before
