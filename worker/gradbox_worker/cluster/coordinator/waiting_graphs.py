"""Where graphs of a forward job wait for the gradient job at their cotangents.

Its receipt says which device ran which range, and how many graphs it kept. The gradient job takes
the same ranges, so that a device which is still there goes on with its graphs, and any other one
replays.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from gradbox.protocol import CotangentsLoss, GradientSpec, JobSpec, RangeView, Receipt
from gradbox_engine.ranges import Range


@dataclass(frozen=True)
class WaitingGraphs:
    """The graphs that a forward job left.

    Attributes:
        job: what the devices that ran it are remembered by, see `leases.LeaseRequest`.
        ranges: that it ran in; none if one device ran it whole.
    """

    job: str
    ranges: tuple[RangeView, ...] = ()

    @classmethod
    def of(cls, spec: JobSpec, earlier_result: Path | None) -> WaitingGraphs | None:
        """Return what a job may find; None if it is no such job, or if nothing was kept.

        Args:
            earlier_result: the forward job's result file, which may be gone.
        """
        if earlier_result is None or not isinstance(spec, GradientSpec):
            return None
        if not isinstance(spec.loss, CotangentsLoss):
            return None
        try:
            with safe_open(earlier_result, framework="pt") as file:
                receipt = Receipt.model_validate_json(file.metadata()["gradbox"])
        except FileNotFoundError:
            return None
        if not receipt.shards_retained:
            return None
        return cls(str(earlier_result), tuple(receipt.ranges or ()))

    @property
    def num_devices(self) -> int:
        """How many devices can use them."""
        return max(1, len(self.ranges))

    @property
    def parts(self) -> tuple[Range, ...]:
        """The ranges, for another job of the same shards."""
        num_ranges = len(self.ranges)
        return tuple(
            Range(index, num_ranges, run.start, run.stop) for index, run in enumerate(self.ranges)
        )

    @property
    def homes(self) -> dict[int, str]:
        """The device of each range."""
        return {index: run.device for index, run in enumerate(self.ranges)}
