"""A tensor that is fetched when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gradbox.remote.batch import Batch


class RemoteOutput(torch.Tensor):
    """z of one call. Any use of it, its shape too, waits for the job that computes it.

    It stands for an ordinary tensor with a `grad_fn`, and what is computed from it is ordinary.
    """

    _batch: Batch
    _place: tuple[int, str]

    @staticmethod
    def standing_for(batch: Batch, place: tuple[int, str], *, holder: torch.Tensor) -> RemoteOutput:
        """Return a stand-in.

        Args:
            place: the call's index, and the name of the output or "".
            holder: what code sees that looks past torch's functions.
        """
        output = holder.as_subclass(RemoteOutput)
        output._batch, output._place = batch, place
        return output

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*_fetched(args), **_fetched(dict(kwargs or {})))


def _fetched(value: Any) -> Any:
    """Put the tensors themselves in place of their stand-ins, in nested arguments too."""
    if isinstance(value, RemoteOutput):
        with torch._C.DisableTorchFunctionSubclass():
            batch, place = value._batch, value._place
        return batch.value(place)
    if isinstance(value, dict):
        return {key: _fetched(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a named one
        return value._make(_fetched(item) for item in value)
    if type(value) in (list, tuple):
        return type(value)(_fetched(item) for item in value)
    return value
