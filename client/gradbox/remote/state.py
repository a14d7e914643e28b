"""A remote model's weights and buffers: what goes along with a job, and what comes back from one.

Weights are the user's, who may change them between calls: jobs are sent copies, and parameters
among them rounded to 16 bits on their way, where `transfer` says so. Buffers are as the calls left
them, or as the user has set them since.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, equal

from gradbox.errors import InvalidInputs
from gradbox.printable import printable
from gradbox.protocol import ModelView
from gradbox.protocol.options import TRANSFER_DTYPES, Transfer
from gradbox.results.result import GradResult


def snapshot(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the weights.

    Raises:
        InvalidInputs: one is no tensor.
    """
    return {name: _copy(value, name) for name, value in weights.items()}


def trainable_leaves(weights: Mapping[str, Any]) -> list[Tensor]:
    """Return the weights that autograd may be asked a gradient of.

    Left out are those with hooks, which would be called without a gradient.
    """
    return [
        value
        for value in weights.values()
        if isinstance(value, Tensor)
        and value.requires_grad
        and value.is_leaf
        and not (value._backward_hooks or value._post_accumulate_grad_hooks)
    ]


def same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Tell whether the weights have the values they had; `.data` leaves no trace but the values."""
    return before.keys() == now.keys() and not changed(before, now)


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return the names of tensors that are new, or have other values than before."""
    return {n for n, value in now.items() if n not in before or not _same(before[n], value)}


def _copy(value: Any, name: str) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray | np.generic):
        return value.copy()
    raise InvalidInputs(
        f"weights[{name!r}]: expected a torch tensor or a NumPy array, got {type(value).__name__}; "
        f"convert it with torch.as_tensor"
    )


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) != isinstance(now, Tensor) or before.dtype != now.dtype:
        return False
    if isinstance(now, Tensor):
        return before.device == now.device and equal(before, now.detach())
    return np.array_equal(before, now)


def rounded_weights(
    weights: Mapping[str, Any], parameters: Collection[str], *, transfer: Transfer
) -> Mapping[str, Any]:
    """Return the weights as they are sent.

    What is no parameter stays as it is, and so does one with a number that the format does not
    hold: none becomes infinite.
    """
    if transfer == "exact":
        return weights
    dtype = getattr(torch, TRANSFER_DTYPES[transfer])
    return {
        name: _rounded(torch.as_tensor(value), dtype) if name in parameters else value
        for name, value in weights.items()
    }


def _rounded(weight: Tensor, form: torch.dtype) -> Tensor:
    if not weight.is_floating_point() or weight.dtype.itemsize <= 2:
        return weight
    rounded = weight.detach().to(form)
    overflows = rounded.isinf() & weight.detach().isfinite()
    return weight if bool(overflows.any()) else rounded


class RemoteBuffers:
    """Carries buffers from one forward job to the next.

    A buffer among the user's weights is laid over when it is first given and whenever its numbers
    are others than at the job before; in between it advances as the calls move it. Plain attributes
    of the model are not carried; that it changes some is warned of, once.

    Attributes:
        values: the buffers after the last job, by name; none before the first.
    """

    def __init__(self, view: ModelView, *, widened: bool) -> None:
        """Carry none yet.

        Args:
            widened: whether jobs compute in float64: what they return is then carried as it is,
                for in the registered dtype it would be rounded wherever one job ends.
        """
        self._dtypes = {buffer.name: getattr(torch, buffer.dtype) for buffer in view.buffers}
        self._widened = widened
        self._tied = view.tied
        self._given: dict[str, Any] = {}
        self._model = view.name
        self._left: list[str] | None = []  # attributes that are not carried; None once it was said
        self.values: dict[str, Tensor] = {}

    def under(self, weights: Mapping[str, Any], *, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the next job is sent.

        Args:
            weights: the user's, as they are sent.
            given: the same before parameters were rounded.
        """
        if self._left:
            self._warn(self._left)
            self._left = None
        set_anew = {self._first(name) for name in changed(self._given, self._among(given))}
        carried = {name: value for name, value in self.values.items() if name not in set_anew}
        others = {n: value for n, value in weights.items() if self._first(n) not in carried}
        return others | carried

    def advance(self, result: GradResult, *, given: Mapping[str, Any]) -> None:
        """Take what a job that was sent `given` made of the buffers."""
        self._given = self._among(given)
        if self._left is not None:
            self._left = result.manifest.changed_attributes
        kept = {n: b for n, b in result.buffers.items() if n in self._dtypes}
        if not self._widened:
            kept = {n: b.to(self._dtypes[n]) for n, b in kept.items()}
        self.values = kept

    def _warn(self, names: Sequence[str]) -> None:
        listed = printable(", ".join(names))
        warnings.warn(
            f"client.model({self._model!r}): expected calls to change no state but buffers, got "
            f"other values of the attributes {listed}. Every job begins with these as registered, "
            f"so calls that read them differ from a local model's from here on: keep them in a "
            f"buffer where the model is built, or use the outputs of all calls together, which "
            f"makes one job of them",
            stacklevel=3,
        )

    def _among(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {n: value for n, value in given.items() if self._first(n) in self._dtypes}

    def _first(self, name: str) -> str:
        return self._tied.get(name, name)
