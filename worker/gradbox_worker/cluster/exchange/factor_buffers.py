"""Rows that are kept as factors, as buffers on their way between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradbox_factors import Factored, packed, unpacked
from gradbox_worker.cluster.exchange.array_buffers import TensorBuffer, as_buffers


@dataclass(frozen=True)
class FactorBuffers:
    """Factors, each once though several terms have it, and which of them make which term."""

    tensors: Mapping[str, TensorBuffer]
    pieces: Sequence[Sequence[Mapping[str, Any]]]

    @classmethod
    def of(cls, factors: Factored) -> FactorBuffers:
        """Return the factors' buffers, which share their memory."""
        tensors, pieces = packed(factors.pieces)
        return cls(as_buffers(tensors), pieces)

    def factored(self, device: torch.device) -> Factored:
        """Return the factors, which must not be written to."""
        tensors = {name: b.tensor(copy=False).to(device) for name, b in self.tensors.items()}
        return Factored(unpacked(tensors, self.pieces))
