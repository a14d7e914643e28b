"""Whose error it is, when a job calls code that is not the engine's."""

from __future__ import annotations

from types import TracebackType

import torch

from gradbox_engine.errors import EngineError, ModelCallFailed


class blaming:  # noqa: N801 - reads as a phrase: with blaming("the model", "shard 3")
    """Turn what foreign code raises into ModelCallFailed, which says where it was called.

    The engine's own errors and running out of memory pass unchanged.
    """

    def __init__(self, what: str, where: str) -> None:
        self._what = what
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, EngineError | torch.OutOfMemoryError | MemoryError):
            return
        if isinstance(error, Exception):
            raise ModelCallFailed(
                f"{self._where}: {self._what} raised {type(error).__name__}: {error}"
            ) from error
