"""The scalar function inner(y, v), and the two derivatives of it that are needed.

a = ∂inner/∂v is the cotangent of G's backward pass. Its own derivative, contracted with a
tangent w of v, is ∂⟨a(y, v), w⟩/∂y: double backward through `inner` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.model.calling.blame import blaming
from gradbox_engine.model.calling.outputs import Outputs, as_z, wide_leaves
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.calling.shard_rng import shard_stream
from gradbox_engine.replay.cotangents import (
    derivatives,
    moved,
    real_number,
    refuse_constant,
)
from gradbox_engine.requests import Objective

STREAM = 2
"""The model's calls draw from stream group 0 and `outer` from 1. Both evaluations of `inner` on a
shard draw the same numbers."""


@dataclass(frozen=True)
class Contraction:
    """⟨a(y, v), w⟩ with a graph that leads to y, the leaves.

    `scale` is ‖a‖‖w‖, the largest value that the product could have.
    """

    product: Tensor
    scale: Tensor
    leaves: Mapping[str, Tensor]

    def gradients(self) -> dict[str, Tensor]:
        """Return ∂⟨a(y, v), w⟩/∂y by name, without those that it does not depend on."""
        with blaming("inner's second derivative", "inner"):
            return _gradients(self.product, self.leaves)


class Inner:
    """Evaluates and differentiates `inner` at the outputs of single shards."""

    def __init__(
        self, objective: Objective, *, device: torch.device, seed: int, widened: bool
    ) -> None:
        self._objective = objective
        self._device = device
        self._seed = seed
        self._widened = widened

    def cotangents(self, position: Position, outputs: Outputs) -> Outputs:
        """Return a = ∂inner/∂v by output name, without outputs that `inner` does not depend on.

        Raises:
            BadInputs: `inner` is a constant.
            ModelCallFailed: `inner` raised.
            LossNotScalar: it returned anything but one real number.
        """
        leaves = wide_leaves(outputs)
        return _gradients(self._evaluate(position, leaves), leaves)

    def contract(self, position: Position, outputs: Outputs, tangents: Outputs) -> Contraction:
        """Contract a(y, v) with w.

        Args:
            outputs: v.
            tangents: w, by the same names.
        """
        leaves = wide_leaves(outputs)
        value = self._evaluate(position, leaves)
        with blaming("inner's derivative", "inner"), torch.enable_grad():
            cotangents = _gradients(value, leaves, create_graph=True)
            terms = [(a * tangents[name]).sum() for name, a in cotangents.items()]
            product = torch.stack(terms).sum() if terms else value.new_zeros(())
        scale = norm(cotangents.values()) * norm(tangents[name] for name in cotangents)
        return Contraction(product, scale, self._objective.parameters)

    def _evaluate(self, position: Position, leaves: Outputs) -> Tensor:
        with (
            blaming("inner", f"shard {position.shard}"),
            torch.enable_grad(),
            torch.autocast(self._device.type, enabled=False),
            shard_stream(self._seed, STREAM, position.shard),
        ):
            inputs: dict[str, Any] = {
                name: moved(value, self._device, widened=self._widened)
                for name, value in self._objective.inputs.items()
            }
            value = self._objective.function(v=as_z(leaves), **inputs)
            refuse_constant(real_number(value, called="inner"), called="inner")
            return value


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of several tensors as one vector; 0-dim, without a graph.

    In float64, but on MPS, which has none: squares in float32 may underflow.
    """
    norms = [
        torch.linalg.vector_norm(x.detach(), dtype=None if x.is_mps else torch.float64)
        for x in tensors
    ]
    return torch.stack(norms).norm() if norms else torch.zeros(())


def _gradients(
    value: Tensor, leaves: Mapping[str, Tensor], *, create_graph: bool = False
) -> dict[str, Tensor]:
    gradients = derivatives([value], list(leaves.values()), create_graph=create_graph)
    return {n: g for n, g in zip(leaves, gradients, strict=True) if g is not None}
