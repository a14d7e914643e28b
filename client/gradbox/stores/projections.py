"""How the rows of a store are projected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradbox.computations.computation import checked
from gradbox.protocol import ProjectionSpec
from gradbox.protocol.per_sample import ProjectionKind


@dataclass(frozen=True)
class Projection:
    """A projection to `dim` numbers, drawn from the store's seed."""

    dim: int
    kind: ClassVar[ProjectionKind]

    @property
    def spec(self) -> ProjectionSpec:
        """What the box is told."""
        return checked(ProjectionSpec, where=f"projection={self!r}", kind=self.kind, dim=self.dim)


class PerLayer(Projection):
    """Each parameter's gradient by itself, read as a matrix: at most `dim` rows and columns.

    What acts on layers, as curvature does, can act on such rows.
    """

    kind = "per_layer"


class CountSketch(Projection):
    """All parameters together to `dim` numbers: the cheapest for its length."""

    kind = "sketch"


class Rademacher(Projection):
    """All parameters together to `dim` numbers by independent signs, as TRAK does."""

    kind = "rademacher"
