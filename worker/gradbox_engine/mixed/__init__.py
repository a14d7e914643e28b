"""Second derivatives through a frozen model: dt/dy without a graph over shards.

Read `gradient`, the job on one page, then `held_passes`, what a device does with a shard.
"""

from gradbox_engine.mixed.gradient import leaves_of, mixed_gradient, split_mixed_gradient
from gradbox_engine.mixed.held_passes import held_mixed

__all__ = ["held_mixed", "leaves_of", "mixed_gradient", "split_mixed_gradient"]
