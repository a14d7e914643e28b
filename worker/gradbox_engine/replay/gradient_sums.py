"""Gradients summed over shards: Σᵢ z̄ᵢᵀ ∂zᵢ/∂θ.

During a backward pass a sum is its parameter's `.grad`, to which autograd adds in place. Where that
is not possible (there is no sum yet, it is wider than the parameter, gradients are scaled, or the
model has such hooks of its own), a hook takes the gradient as soon as it is complete and adds it.
Either way one parameter's gradient is alive beside the sums, not all of them. Sums are float32 or
wider. A parameter's first gradient becomes its sum, or is copied where anything else may hold its
memory: a backward pass may hand one tensor to two parameters, or hand out one that it saved.

A backward pass that ended early leaves sums that are of no use: `clear` them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.errors import ModelCallFailed
from gradbox_engine.model.precision import accumulation_dtype
from gradbox_engine.torch_private import hooks_after_accumulation, num_holders


class GradientSums:
    """One sum for each parameter that a backward pass has reached.

    Gradients are `scale` times too large, see `replay`, and are divided by it.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)
        self.scale = 1.0
        self._sums: dict[str, Tensor] = {}

    def expected_bytes(self) -> int:
        """Return how many bytes the sums take when every parameter has one."""
        return sum(
            parameter.numel() * accumulation_dtype(parameter.dtype).itemsize
            for parameter in self.parameters.values()
        )

    @contextmanager
    def added_up(self) -> Iterator[None]:
        """Add the gradients of the backward passes that run until this ends.

        Raises:
            ModelCallFailed: a parameter does not require grad any more.
        """
        handles = []
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                raise ModelCallFailed(
                    f"parameter {name!r}: expected it to require grad throughout the job, but the "
                    f"model has switched that off in its forward pass; freeze it before it is "
                    f"registered, or leave it out by wrt="
                )
            total = self._sums.get(name)
            exact = total is not None and total.dtype == parameter.dtype and self.scale == 1.0
            # A hook of the model's own changes one shard's gradient, not the sum so far.
            if exact and not hooks_after_accumulation(parameter):
                parameter.grad = total
            else:
                parameter.grad = None  # what the model's own backward passes may have left
                hook = partial(self._add, name)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter in self.parameters.values():
                parameter.grad = None

    @torch.no_grad()
    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add gradients that no backward pass has added up."""
        for name, gradient in gradients.items():
            if name in self._sums:
                self._sums[name].add_(gradient)
            else:
                dtype = accumulation_dtype(gradient.dtype)
                self._sums[name] = gradient.to_dense().to(dtype, copy=True)

    def clear(self) -> None:
        """Forget all sums."""
        self._sums.clear()

    def state(self) -> Checkpoint:
        """Return the sums so far, for another process."""
        return Checkpoint(self._sums, {"scale": self.scale})

    def resume(self, state: Checkpoint) -> None:
        """Go on from a `state` of another process."""
        self._sums = {n: t.to(self.parameters[n].device) for n, t in state.tensors.items()}
        self.scale = state.facts["scale"]

    def finite(self) -> bool:
        """Return whether every entry of every sum is finite; waits for the device."""
        flags = [gradient.isfinite().all() for gradient in self._sums.values()]
        return not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all())

    def reached(self) -> dict[str, Tensor]:
        """Return the sums of the parameters that a backward pass has reached, in their order."""
        return {
            name: self._sums[name].resolve_conj() for name in self.parameters if name in self._sums
        }

    def _add(self, name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if name in self._sums:
            self._sums[name].add_(gradient, alpha=1 / self.scale)
            return
        gradient = gradient.to_dense()
        shared = len(hooks_after_accumulation(parameter) or ()) > 1 or not _alone(gradient)
        wide = gradient.to(accumulation_dtype(gradient.dtype), copy=shared)
        self._sums[name] = wide if self.scale == 1.0 else wide.mul_(1 / self.scale)


def _alone(gradient: Tensor) -> bool:
    """Return whether a gradient is the only holder of its memory, and all that is in it."""
    storage = gradient.untyped_storage()
    return (
        num_holders(storage) == 2  # the gradient, and `storage` here
        and storage.resizable()  # memory of NumPy's or another library's is not
        and storage.nbytes() == gradient.nbytes
    )
