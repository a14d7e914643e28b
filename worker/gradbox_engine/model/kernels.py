"""Kernels that can be differentiated twice and forward.

The fused ones cannot: attention's flash and memory-efficient kernels, cuDNN's and oneDNN's LSTM.
All passes over a shard run the same kernels, so that values and dropout masks agree between them;
so the first pass pays for it too, in attention with memory for T² scores a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


@contextmanager
def differentiable_kernels() -> Iterator[None]:
    """Have attention and recurrent layers computed from operations that all have rules."""
    with sdpa_kernel(SDPBackend.MATH), _UnfusedRecurrence():
        yield


@contextmanager
def checkpoints_inlined() -> Iterator[None]:
    """Let reentrant checkpoints simply call their function.

    They know neither forward mode nor `torch.autograd.grad`. The random numbers drawn are the same,
    and with forward mode there is no graph to save the memory of.
    """
    before = torch.utils.checkpoint.CheckpointFunction
    torch.utils.checkpoint.CheckpointFunction = _Inlined  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.utils.checkpoint.CheckpointFunction = before  # type: ignore[misc]


class _Inlined:
    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


class _UnfusedRecurrence(TorchFunctionMode):
    """Switches cuDNN and oneDNN off inside recurrent layers, and only there."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in RECURRENT:
            return func(*args, **kwargs)
        with _libraries_off():
            return func(*args, **kwargs)


@contextmanager
def _libraries_off() -> Iterator[None]:
    libraries: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.mkldnn)
    before = [library.enabled for library in libraries]
    try:
        for library in libraries:
            library.enabled = False
        yield
    finally:
        for library, enabled in zip(libraries, before, strict=True):
            library.enabled = enabled
