"""Gradients summed over shards: Σᵢ z̄ᵢᵀ ∂zᵢ/∂θ.

A parameter's gradient of a shard joins the sum as soon as it is complete, so beside the sums one
parameter's gradient is alive, not all of them. Sums are float32 or wider.

Where a sum has its parameter's dtype and no scale comes between, autograd adds in place: while it
is lent, the sum is the parameter's `.grad`. Elsewhere a hook adds.

A backward pass that ended early leaves sums that are of no use: `clear` them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradbox_engine.model.precision import accumulation_dtype

_storage_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
SOLE_USE = 2
"""How often a storage is in use that one tensor has, and whoever asks."""


class GradientSums:
    """One sum for each parameter that a backward pass has reached."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)
        self.scale = 1.0
        self._sums: dict[str, Tensor] = {}
        self._wide = frozenset(
            name for name, p in parameters.items() if accumulation_dtype(p.dtype) == p.dtype
        )
        self._lent: frozenset[str] = frozenset()
        self._handles: list[RemovableHandle] = []

    def expected_bytes(self) -> int:
        """Return how many bytes the sums take when every parameter has one."""
        return sum(
            parameter.numel() * accumulation_dtype(parameter.dtype).itemsize
            for parameter in self.parameters.values()
        )

    def lend(self) -> None:
        """Have the next backward passes add to the sums; the model must not run meanwhile."""
        if self._lent and not self._handles:
            return
        self.take_back()
        self._lent = self._wide if self.scale == 1.0 else frozenset()
        for name, parameter in self.parameters.items():
            if name in self._lent and name in self._sums:
                parameter.grad = self._sums[name]
            else:
                parameter.grad = None  # what the model's own backward passes may have left
                hook = partial(self._start if name in self._lent else self._add, name)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def take_back(self) -> None:
        """Leave the parameters without gradients and hooks."""
        for handle in self._handles:
            handle.remove()
        for name in self._lent:
            parameter = self.parameters[name]
            if parameter.grad is not None:
                self._sums[name], parameter.grad = parameter.grad, None
        self._handles.clear()
        self._lent = frozenset()

    def clear(self) -> None:
        """Forget all sums."""
        self.take_back()
        self._sums.clear()

    def finite(self) -> bool:
        """Return whether every entry of every sum is finite; waits for the device."""
        self.take_back()
        flags = [gradient.isfinite().all() for gradient in self._sums.values()]
        return not flags or bool(torch.stack([flag.cpu() for flag in flags]).all())

    def named(self) -> dict[str, Tensor]:
        """Return all sums in the parameters' order; zeros where nothing came."""
        self.take_back()
        return {
            name: self._sums[name].resolve_conj()
            if name in self._sums
            else torch.zeros_like(parameter, dtype=accumulation_dtype(parameter.dtype))
            for name, parameter in self.parameters.items()
        }

    def unreached(self) -> tuple[str, ...]:
        """Return the parameters that no backward pass has come to."""
        self.take_back()
        return tuple(name for name in self.parameters if name not in self._sums)

    def _start(self, name: str, parameter: Tensor) -> None:
        """Begin a sum; under reentrant checkpointing other parts of the same gradient join it."""
        if name not in self._sums and parameter.grad is not None:
            self._sums[name] = parameter.grad = _owned(parameter.grad)

    def _add(self, name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if name in self._sums:
            self._sums[name].add_(gradient, alpha=1 / self.scale)
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        wide = gradient.to(accumulation_dtype(gradient.dtype), copy=True)
        self._sums[name] = wide if self.scale == 1.0 else wide.mul_(1 / self.scale)


def _owned(gradient: Tensor) -> Tensor:
    """Return a dense gradient whose memory no other tensor has."""
    if gradient.is_sparse:
        return gradient.to_dense()
    storage = gradient.untyped_storage()
    if _storage_uses is None or storage.nbytes() != gradient.nbytes:
        return gradient.clone()
    return gradient if _storage_uses(storage._cdata) == SOLE_USE else gradient.clone()
