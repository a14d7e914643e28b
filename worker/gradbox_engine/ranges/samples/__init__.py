"""Per-sample gradients and Jacobians over several devices, a range of the shards on each.

Samples do not depend on each other, and every shard begins with the registered buffers. So a range
is a job of its own, whose random streams and rows are numbered by the whole one, and a device that
is lost costs its range's call. What couples samples is done when ranges have ended: sums are added
in the tree of `reduction`, and a Gram is made block by block of factors that stay on their devices.

Read `split_samples`, the leader's side; `sample_ranges`, a device's; `protocol`, between them.
"""

from gradbox_engine.ranges.samples.protocol import (
    RangeSamples,
    Rows,
    SampleDevice,
    SampleDevices,
    SampleTask,
)
from gradbox_engine.ranges.samples.sample_ranges import OffsetSink, SampleRanges
from gradbox_engine.ranges.samples.split_samples import SampleRun, SplitSamples, split_samples

__all__ = [
    "OffsetSink",
    "RangeSamples",
    "Rows",
    "SampleDevice",
    "SampleDevices",
    "SampleRanges",
    "SampleRun",
    "SampleTask",
    "SplitSamples",
    "split_samples",
]
