"""Second derivatives through a frozen model: dt/dy without a graph over shards."""

from gradbox_engine.mixed.gradient import mixed_gradient

__all__ = ["mixed_gradient"]
