"""What passes between the leader of a per-sample job and the devices that run its ranges.

Every call stands by itself: nothing is held on a device between two of them but the rows that a
`Rows` names. Tensors are plain ones in the host's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from gradbox_engine.per_sample.planned_model import Plans
from gradbox_engine.per_sample.request import Form, SampleResult
from gradbox_engine.ranges.protocol import Range
from gradbox_factors import Factored

Rows = object
"""A range's rows as factors: only who implements `SampleDevices` looks inside."""


@dataclass(frozen=True)
class SampleTask:
    """What a range is to compute, beyond what the job's request says of all ranges.

    `loss_inputs` have the range's own rows where `by_sample` names them. `vectors` are the range's
    rows for a `vjp`, and whole for a `jvp`.
    """

    reduce: str
    form: Form
    first_sample: int  # of the range in the job
    num_samples: int  # of the job
    loss_inputs: Mapping[str, Any] = field(default_factory=dict)
    by_sample: frozenset[str] = frozenset()
    vectors: Any = None
    plans: Plans = field(default_factory=dict)  # of all ranges' shards, as far as they are shared
    against: Factored | None = None
    of_others: bool = False  # whether the range is of the other shards, see `OtherShards`
    keep_rows: bool = False  # whether factors stay on the device, as `RangeSamples.rows`


@dataclass(frozen=True)
class RangeSamples:
    """What a range's samples gave: a result of these alone."""

    result: SampleResult
    rows: Rows | None = None


class SampleDevice(Protocol):
    """One device that has the job's model. A future ends with an `EngineError` or `DeviceLost`."""

    def plans(self, part: Range, shards: Sequence[int], *, of_others: bool) -> Future[Plans]:
        """Return plans for the shapes of some of the job's shards, for all devices.

        Args:
            part: the range that the device has.
        """

    def smaller(self, part: Range, task: SampleTask) -> Future[bool]:
        """Return whether `form="auto"` keeps factors, by a range's first shard and B of the job."""

    def run(self, part: Range, task: SampleTask) -> Future[RangeSamples]:
        """Compute a range."""


class SampleDevices(Protocol):
    """The devices that a job has."""

    def take(self, part: Range) -> SampleDevice:
        """Return a device for a call on a range.

        Raises:
            DeviceLost: there is none left.
        """

    def gram(self, left: Rows, right: Rows | None, *, trace: bool) -> Future[Tensor]:
        """Return the Gram of two ranges' rows, of one with itself where `right` is None.

        The future ends with `DeviceLost` where rows are lost; those are made again then.
        """
