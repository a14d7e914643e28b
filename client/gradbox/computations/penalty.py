"""Terms on intermediate activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradbox.arguments import explain_arguments
from gradbox.computations.computation import checked
from gradbox.computations.traced_function import traced
from gradbox.inputs.uploads import Uploads
from gradbox.protocol import PenaltySpec

if TYPE_CHECKING:
    import torch


@explain_arguments
@dataclass(frozen=True, kw_only=True, eq=False)
class Penalty:
    """A term Σᵢ weight · loss(tapᵢ) added to L, tapᵢ being an intermediate activation of shard i.

    Its graph is gone before the next layer runs, so many penalties take no more memory than one.

    Args:
        at: a submodule by one of its names, whose output is the tap, or an element of that output:
            `encoder.layer.3`, `encoder.layer.3[0]`, `encoder[last_hidden_state]`, `lstm[1][0]`. One
            that a shard goes through several times is tapped each time.
        loss: tap → scalar, traced as every loss is. Parameters of its own are held constant.
        weight: the factor before it.
        per_sample_scale: a function of the shard's final outputs z that gives one number a sample,
            (b,); sample b's gradient of the penalty is multiplied by it on its way back. It is held
            constant, and the value of L does not contain it.
    """

    at: str
    loss: Callable[..., Any] | torch.nn.Module
    weight: float = 1.0
    per_sample_scale: Callable[..., Any] | None = None

    def spec(self, uploads: Uploads) -> PenaltySpec:
        """Trace the functions and return the penalty as it is posted."""
        what = f"penalty at {self.at!r}"
        scale = None
        if self.per_sample_scale is not None:
            scale = traced(
                self.per_sample_scale, uploads, what=f"{what}: per_sample_scale", positional=1
            )
        loss = traced(self.loss, uploads, what=what, positional=1)
        return checked(
            PenaltySpec,
            where=what,
            at=self.at,
            loss=loss,
            weight=self.weight,
            per_sample_scale=scale,
        )
