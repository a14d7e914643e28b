"""Mixed second derivatives over several devices, a range of the shards on each.

The phases are those of a set loss, so the devices' protocol is too, and `split_job` runs it: a
range's part of dfdz takes the place of its rows of Z, u = ∂t/∂dfdz that of the cotangents, and the
sums are of gradients by y. What a device needs and tells beyond that is in `DirectionsOfRange` and
`RangeTangents`.

Read `split_mixed`, the coordinator's side, and `held_mixed`, a device's.
"""

from gradbox_engine.ranges.mixed.held_mixed import (
    DirectionsOfRange,
    HeldMixed,
    RangeTangents,
    held_mixed,
)
from gradbox_engine.ranges.mixed.split_mixed import SplitMixed, split_mixed_gradient

__all__ = [
    "DirectionsOfRange",
    "HeldMixed",
    "RangeTangents",
    "SplitMixed",
    "held_mixed",
    "split_mixed_gradient",
]
