"""In which arithmetic a job runs, and how far a replay may then drift.

`fp32` is the weights' own dtype with TensorFloat-32 off, `tf32` the same with it on, `fp64` widens
weights, buffers and inputs for the job, `bf16` and `fp16` run the model under autocast. The loss
always gets Z in float32 or wider, and gradients are summed in float32 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.requests import Precision

AUTOCAST: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

REPLAY_TOLERANCE: dict[torch.dtype | Precision, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
    "tf32": 1e-3,
    "bf16": 3e-2,
    "fp16": 4e-3,
}
"""Largest |z' − z| / max |z| of a shard. Both passes run the same kernels on the same numbers, so
on a CPU the difference is zero; on CUDA some kernels add in no fixed order. About 1000 units in the
last place for float32, 8 for the 16-bit dtypes; another dropout mask moves z by 0.1 to 1."""

MOST_DOUBLINGS = 120
"""Scales stay within float32, in which cotangents are scaled and sums divided."""


def replay_tolerance(precision: Precision, dtype: torch.dtype) -> float:
    """Return how far z of `dtype` may differ in a replay at `precision`."""
    return max(REPLAY_TOLERANCE.get(precision, 0.0), REPLAY_TOLERANCE[dtype])


@cache
def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of `dtype` are summed: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def passes_float16(parameters: Iterable[Tensor], precision: Precision) -> bool:
    """Return whether gradients pass through float16: under its autocast, or to such parameters."""
    return precision == "fp16" or any(p.dtype == torch.float16 for p in parameters)


def fp16_scale(tensors: Iterable[Tensor], *, largest: float) -> float:
    """Return the power of two that lifts the largest entry of some tensors to about `largest`.

    1 where they are all zero, or not finite. Waits for the device.
    """
    largest_of_each = [tensor.abs().amax() for tensor in tensors if tensor.numel()]
    top = float(torch.stack(largest_of_each).amax()) if largest_of_each else 0.0
    if not 0 < top < math.inf:
        return 1.0
    return 2.0 ** min(round(math.log2(largest / top)), MOST_DOUBLINGS)


@contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """Set the global switches that decide which kernels run, and put them back.

    TensorFloat-32 is used with `tf32` alone. torch's fused inference path for attention is off,
    for it gives other roundings than the path with a graph.
    """
    matmul = "tf32" if precision == "tf32" else "ieee"
    older = _older_switch()
    library: Any = torch.backends  # whose stubs lack these
    on_gpu = library.cuda.matmul, library.cudnn.conv, library.cudnn.rnn
    on_cpu = library.mkldnn.matmul, library.mkldnn.conv, library.mkldnn.rnn
    before = [(switch, switch.fp32_precision) for switch in (*on_gpu, *on_cpu)]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    default_dtype = torch.get_default_dtype()
    try:
        # torch refuses to read the older switch, as its compiler does, where the two disagree.
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        for switch in on_gpu:
            switch.fp32_precision = matmul
        for switch in on_cpu:
            switch.fp32_precision = "ieee"
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for switch, value in before:
            switch.fp32_precision = value
        torch.backends.mha.set_fastpath_enabled(fast_path)
        torch.set_default_dtype(default_dtype)  # which a model's forward pass may have set


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the autocast state of the model's calls: the same in both passes.

    Nothing is switched where none is wanted and the caller has none either.
    """
    dtype = AUTOCAST.get(precision)
    if dtype is None and not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def _older_switch() -> str:
    """Return it; torch's default where the newer ones were set otherwise."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "highest"
