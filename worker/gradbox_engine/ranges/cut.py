"""Cuts a job's shards into contiguous ranges of about the same cost.

The r-th of k ranges ends after the shard at which the summed cost is nearest to r/k of the whole.
So the dearest range costs at most one shard more than an even share, and where the cuts are follows
from the costs and from k alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from gradbox_engine.errors import BadInputs
from gradbox_engine.ranges.protocol import Range


def cut(costs: Sequence[float], num_ranges: int) -> tuple[Range, ...]:
    """Return ranges that cover all shards in order, each with one shard or more.

    Args:
        costs: of each shard, in the order of `all_positions`; in any unit, none below zero.
        num_ranges: how many at most; fewer where there are fewer shards.

    Raises:
        BadInputs: fewer than one range is asked for, or there is no shard.
    """
    if num_ranges < 1 or not costs:
        raise BadInputs(
            f"ranges: expected one or more over one shard or more, got {num_ranges} over "
            f"{len(costs)} shards"
        )
    num_ranges = min(num_ranges, len(costs))
    sums = list(accumulate(costs))
    if sums[-1] <= 0:
        sums = list(range(1, len(costs) + 1))
    ends = [0]
    for r in range(1, num_ranges):
        left = num_ranges - r  # ranges that still need a shard each
        end = _nearest(sums, sums[-1] * r / num_ranges) + 1
        ends.append(min(max(end, ends[-1] + 1), len(costs) - left))
    ends.append(len(costs))
    return tuple(
        Range(index, num_ranges, start, stop) for index, (start, stop) in enumerate(pairwise(ends))
    )


def _nearest(sums: Sequence[float], wanted: float) -> int:
    """Return the place of the entry nearest to `wanted` in a rising sequence, the first of two."""
    place = bisect_left(sums, wanted)
    if place > 0 and wanted - sums[place - 1] <= sums[place] - wanted:
        return place - 1
    return place
