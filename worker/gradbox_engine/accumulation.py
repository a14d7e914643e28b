"""Gradients summed over shards: Σᵢ z̄ᵢᵀ ∂zᵢ/∂θ.

A parameter's gradient of a shard joins the sum as soon as it is complete, so beside the sums one
parameter's gradient is alive, not all of them. Sums are float32 or wider.

Where a sum has its parameter's dtype and no scale comes between, autograd adds in place: for as
long as a backward pass runs, the sum is the parameter's `.grad`. Elsewhere a hook adds.

A backward pass that ended early leaves sums that are of no use: `clear` them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from gradbox_engine.precision import accumulation_dtype

_storage_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
SOLE_USE = 2
"""How often a storage is in use that one tensor has, and whoever asks."""


class GradientSums:
    """One sum for each parameter that a backward pass has reached."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)
        self.scale = 1.0
        self._sums: dict[str, Tensor] = {}
        self._wide = {n for n, p in parameters.items() if accumulation_dtype(p.dtype) == p.dtype}

    def expected_bytes(self) -> int:
        """Return how many bytes the sums take when every parameter has one."""
        return sum(
            parameter.numel() * accumulation_dtype(parameter.dtype).itemsize
            for parameter in self.parameters.values()
        )

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Take gradients from the parameters for as long as this lasts: one backward pass."""
        in_place = self._wide if self.scale == 1.0 else frozenset()
        handles = []
        for name, parameter in self.parameters.items():
            if name in in_place and name in self._sums:
                parameter.grad = self._sums[name]
            else:
                hook = partial(self._start if name in in_place else self._add, name)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for name in in_place:
                parameter = self.parameters[name]
                if parameter.grad is not None:
                    self._sums[name], parameter.grad = parameter.grad, None

    def clear(self) -> None:
        """Forget all sums."""
        self._sums.clear()

    def finite(self) -> bool:
        """Return whether every entry of every sum is finite; waits for the device."""
        flags = [gradient.isfinite().all() for gradient in self._sums.values()]
        return not flags or bool(torch.stack([flag.cpu() for flag in flags]).all())

    def named(self) -> dict[str, Tensor]:
        """Return all sums in the parameters' order; zeros where nothing came."""
        return {
            name: self._sums[name]
            if name in self._sums
            else torch.zeros_like(parameter, dtype=accumulation_dtype(parameter.dtype))
            for name, parameter in self.parameters.items()
        }

    def unreached(self) -> tuple[str, ...]:
        """Return the parameters that no backward pass has come to."""
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
