"""A remote model's buffers: as its calls left them, or as the user has set them since."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradbox.printable import printable
from gradbox.protocol import ModelView
from gradbox.remote.live_weights import changed
from gradbox.results.result import GradResult


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
