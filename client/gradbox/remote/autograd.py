"""The graph behind a remote model's outputs.

    anchor, weights ──→ GradientJob ──┬──────────────→ CallOutput → z of a call
    inputs ──→ CallInputs ────────────┴─(of its call)→

Autograd runs every node that can be reached from the loss, whether a gradient comes that way or
not, and frees what it saved. So inputs hang on the outputs of their own call alone: another call of
the same job leaves what they were computed from as it is. `CallOutput` notes its cotangent; a
second backward pass through a call that was not retained fails there, as in a local graph. Whoever
needs gradients first, `CallInputs` or `GradientJob`, runs one gradient job for all that was noted:
autograd takes what was made last first, so that is one job, except where cotangents come from
several devices, whose threads do not wait for each other. `GradientJob` runs only where autograd
wants the gradients of the model itself: `torch.autograd.grad(loss, x)` leaves them alone, as it
does with local ones. `anchor` is a leaf that requires grad, so that outputs do even where no input
does.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from gradbox.errors import InvalidInputs


class DoneForward(Protocol):
    """A forward job that is done."""

    def note(self, slot: Any, cotangent: Tensor) -> None:
        """Remember a cotangent of the backward pass that runs."""

    def input_grads(self, call: int) -> list[Tensor | None]:
        """Return the gradients of a call's inputs, by a gradient job if none has run for it."""

    def accumulate(self) -> None:
        """Add the gradients of this pass to the model's."""


class GradientJob(Function):
    """The node whose backward adds the gradients of a job to the model's.

    Weights hang on it, though no gradient goes to them: whoever asks autograd for theirs is told
    so, and does not take what comes by the rest of the loss for the whole.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, job: DoneForward, *weights: Tensor) -> Tensor:
        ctx.job, ctx.num_weights = job, len(weights)
        return anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if not torch._C._will_engine_execute_node(ctx.next_functions[0][0]):  # the anchor's
            raise InvalidInputs(
                "expected loss.backward() for gradients of a remote model's weights, got "
                "torch.autograd.grad(loss, weights) or backward(inputs=weights): after "
                "loss.backward() they are in f.grads by name, and f.apply_to(module) adds them"
            )
        ctx.job.accumulate()
        return gradients[0], None, *[None] * ctx.num_weights


class CallInputs(Function):
    """The inputs of one call that require grad."""

    @staticmethod
    def forward(ctx: Any, job: DoneForward, call: int, *inputs: Tensor) -> Tensor:
        ctx.job, ctx.call = job, call
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *ctx.job.input_grads(ctx.call)


class CallOutput(Function):
    """One output of one call; used up by one backward pass unless the graph is retained."""

    @staticmethod
    def forward(ctx: Any, job: DoneForward, slot: Any, output: Tensor, *tokens: Tensor) -> Tensor:
        ctx.job, ctx.slot, ctx.tokens = job, slot, len(tokens)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output.new_empty(0))
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise InvalidInputs(
                "expected one derivative through a remote model, got create_graph=True, which asks "
                "for a second: leave it out, or use MixedGradient, which differentiates twice on "
                "the box"
            )
        _ = ctx.saved_tensors
        if gradients[0] is not None:
            ctx.job.note(ctx.slot, gradients[0])
        return None, None, None, *[torch.zeros(()) for _ in range(ctx.tokens)]


class NotFetched(Function):
    """Stands where an output is that was never fetched; no gradient must come here.

    It holds no numbers, so that code which looks past torch's functions fails on it, and has a rare
    dtype, so that torch.as_tensor(z, dtype=...) does not find that nothing is to be done.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor) -> Tensor:
        return torch.empty((), dtype=torch.float16, device="meta")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise InvalidInputs(
            "expected the outputs of a remote model to be used by torch functions, got one that "
            "was handed to a custom autograd Function, or to compiled code, before it was fetched: "
            "pass z.clone() instead of z"
        )
