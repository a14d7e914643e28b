"""Whose error it is, when a job calls code that is not the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn

from gradbox_engine.errors import EngineError, ModelCallFailed
from gradbox_engine.model.calling.failed_call import describe

OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
    "std::bad_alloc",
)
"""How torch's CPU allocator and the libraries below torch say it, in plain RuntimeErrors."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether memory ran out: not all of torch raises an OutOfMemoryError for that."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in OUT_OF_MEMORY_TEXTS
    )


class blaming:  # noqa: N801 - reads as a phrase: with blaming("the model", "shard 3")
    """Turn what foreign code raises into ModelCallFailed, which says where it was called.

    The engine's own errors pass unchanged. Running out of memory becomes torch.OutOfMemoryError,
    whatever the device.

    Args:
        model: whose submodule the message names.
        arguments: what was called with, by name; the message has dtypes and shapes.
    """

    def __init__(
        self,
        what: str,
        where: str,
        *,
        model: nn.Module | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._what = what
        self._where = where
        self._model = model
        self._arguments = arguments or {}

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, EngineError | torch.OutOfMemoryError):
            return
        if is_out_of_memory(error):
            raise torch.OutOfMemoryError(f"{self._where}: {self._what}: {error}") from error
        if isinstance(error, Exception):
            details = describe(error, trace, model=self._model, arguments=self._arguments)
            raise ModelCallFailed(
                f"{self._where}: {self._what} raised {type(error).__name__}: {error}{details}"
            ) from error
