"""The graph behind a remote model's outputs.

    anchor → AccumulatedGrads ─┐
    inputs ────────────────────┴→ JobOutputs → CallOutput → z of a call
                                             → CallOutput → z of another

`JobOutputs` is one node for all calls of a forward job, so that autograd hands it their cotangents
together and one gradient job serves them all. `CallOutput` is one for each call: a second backward
pass through a call that was not retained fails, as it does in a local graph, while the other calls
of the job can still have their first. `AccumulatedGrads` runs only where autograd wants the
gradients of the model itself: `torch.autograd.grad(loss, x)` leaves them alone, as it does with
local ones. `anchor` is a leaf that requires grad, so that outputs do even where no input does.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from gradbox.errors import InvalidInputs


class DoneForward(Protocol):
    """A forward job that is done."""

    def replay(self, cotangents: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Run the gradient job; return the gradients of the inputs and keep the others."""

    def accumulate(self) -> None:
        """Add the gradients of the last replay to the model's."""


class AccumulatedGrads(Function):
    """The node whose backward adds the gradients of a job to the model's."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, job: DoneForward) -> Tensor:
        ctx.job = job
        return anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.job.accumulate()
        return gradients[0], None


class JobOutputs(Function):
    """The outputs of all calls of a job."""

    @staticmethod
    def forward(
        ctx: Any, job: DoneForward, outputs: list[Tensor], token: Tensor, *inputs: Tensor
    ) -> Any:
        ctx.job = job
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise InvalidInputs(
                "expected one derivative through a remote model, got create_graph=True, which asks "
                "for a second: leave it out, or use MixedGradient, which differentiates twice on "
                "the box"
            )
        input_grads = ctx.job.replay(cotangents)
        return None, None, torch.zeros(()), *input_grads


class CallOutput(Function):
    """One output of one call; used up by one backward pass unless the graph is retained."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.save_for_backward(output.new_empty(0))
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        _ = ctx.saved_tensors
        return gradients[0]


class NotFetched(Function):
    """Stands where an output is that was never fetched; no gradient must come here."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor) -> Tensor:
        return torch.full((), torch.nan)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise InvalidInputs(
            "expected the outputs of a remote model to be used by torch functions, got one that "
            "was handed to a custom autograd Function, or to compiled code, before it was fetched: "
            "pass z.clone() instead of z"
        )
