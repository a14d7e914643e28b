"""The result of a per-sample job out of those of its ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradbox_engine.errors import BadInputs
from gradbox_engine.per_sample.request import SampleResult
from gradbox_engine.ranges.protocol import NamedSums, Range
from gradbox_engine.ranges.reduction import added, split_in_tree
from gradbox_factors import Factored

SUMMED = ("clipped_sum", "vjp")
"""Reductions that sum over samples; all others have something for each."""


def joined(
    parts: Sequence[Range], results: Sequence[SampleResult], *, reduce: str, seconds: float
) -> SampleResult:
    """Return what the job over all ranges gives.

    Raises:
        BadInputs: ranges differ in their number of outputs.
    """
    first = results[0]
    for part, result in zip(parts, results, strict=True):
        if result.outputs != first.outputs:
            raise BadInputs(
                f"shard {part.start}: expected {first.outputs} outputs a sample like shard 0, got "
                f"{result.outputs}: pad the shards alike, or pool in readout="
            )
    if len(results) == 1:
        return first
    arrays = [result.arrays for result in results]
    loops = {name: why for result in results for name, why in result.loops.items()}
    return SampleResult(
        arrays=tree_sum(arrays) if reduce in SUMMED else _cat(arrays),
        factors=joined_factors([result.factors for result in results]),
        parameter_norms=_cat([result.parameter_norms for result in results]),
        values=torch.cat([r.values for r in results if r.values is not None]),
        roads={
            name: ("loop",) if name in loops else _all_roads(name, results)
            for name in dict.fromkeys(name for result in results for name in result.roads)
        },
        loops=loops,
        unreached=tuple(n for n in first.unreached if all(n in r.unreached for r in results)),
        names=first.names,
        samples=sum(result.samples for result in results),
        outputs=first.outputs,
        seconds=seconds,
    )


def joined_factors(factors: Sequence[Factored | None]) -> Factored | None:
    """Return the factors of all ranges, in order."""
    pieces = [piece for found in factors if found is not None for piece in found.pieces]
    return Factored(pieces) if pieces else None


def tree_sum(sums: Sequence[NamedSums]) -> NamedSums:
    """Return the sum over ranges, see `reduction`."""
    if len(sums) == 1:
        return sums[0]
    left, right = split_in_tree(sums)
    return added(tree_sum(left), tree_sum(right))


def _cat(named: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([tensors[name] for tensors in named]) for name in named[0]}


def _all_roads(name: str, results: Sequence[SampleResult]) -> tuple[str, ...]:
    return tuple(sorted({road for result in results for road in result.roads.get(name, ())}))
