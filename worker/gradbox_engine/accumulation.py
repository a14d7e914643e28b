"""Gradients summed over shards: Σᵢ z̄ᵢᵀ ∂zᵢ/∂θ.

autograd hands each parameter's gradient of a shard to a hook as soon as it is complete; it is added
to the sum and let go, so beside the sums one parameter's gradient is alive, not all of them. Sums
are float32 or wider.

Under reentrant checkpointing a parameter's gradient may come in several parts. A backward pass that
ended early, for want of memory, may be run again: the parts that it had added are not added twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from gradbox_engine.precision import accumulation_dtype


class GradientSums:
    """One sum for each parameter that a backward pass has reached."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)
        self.scale = 1.0
        self._sums: dict[str, Tensor] = {}
        self._added: Counter[str] = Counter()  # parts of the shard's gradient, by parameter
        self._come: Counter[str] = Counter()  # the same, in the attempt that is running

    def expected_bytes(self) -> int:
        """Return how many bytes the sums take when every parameter has one."""
        return sum(
            parameter.numel() * accumulation_dtype(parameter.dtype).itemsize
            for parameter in self.parameters.values()
        )

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Take gradients from the parameters for as long as this lasts."""
        handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
            for name, parameter in self.parameters.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_shard(self) -> None:
        """Say that what comes now belongs to another shard."""
        self._added.clear()
        self._come.clear()

    def begin_attempt(self) -> None:
        """Say that the shard's backward pass starts, perhaps not for the first time."""
        self._come.clear()

    def clear(self) -> None:
        """Forget all sums."""
        self._sums.clear()
        self.begin_shard()

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

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            self._come[name] += 1
            if gradient is None or self._come[name] <= self._added[name]:
                return
            self._added[name] = self._come[name]
            if name in self._sums:
                self._sums[name].add_(gradient, alpha=1 / self.scale)
                return
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            wide = gradient.to(accumulation_dtype(gradient.dtype), copy=True)
            self._sums[name] = wide if self.scale == 1.0 else wide.mul_(1 / self.scale)

        return take
