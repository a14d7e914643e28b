"""What passes between the leader of a job and the devices that run its ranges.

    leader                                      device of range r
    forward(r)                        →         first pass of the range; its graphs stay there
    Z, dL/dZ                          ←         RangeOutputs
    replay(r, RangeCotangents)        →         replay of the range; its sums stay there
                                      ←         RangeGradient
    added(sums, sums), fetched(sums)            one sum is left

Every tensor in these dataclasses is a plain one without a graph. How they travel, by way of the
host's memory or not at all, is the business of who implements `RangeDevice` and `Devices`;
`one_device` is the implementation without travel, which defines what every other has to return.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.requests import Phase, Precision, Recomputed

T = TypeVar("T")

HOST = torch.device("cpu")

Sums = object
"""Sums of gradients, wherever they are: only who implements `Devices` looks inside."""

NamedSums = dict[str, Tensor]
"""Sums of gradients by parameter, of those parameters alone that a backward pass has reached."""


@dataclass(frozen=True)
class Range:
    """Consecutive shards: `all_positions(groups)[start:stop]`, across groups."""

    index: int  # of the range among the job's ranges
    num_ranges: int  # how many the job has
    start: int
    stop: int

    @property
    def num_shards(self) -> int:
        """How many shards it has."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether it is the job's only range, so that it may hold any state."""
        return self.num_ranges == 1


@dataclass(frozen=True)
class GradientForm:
    """The shape and dtype of one parameter's sum of gradients."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """How many bytes it has."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class NormStatistics:
    """A batch norm's running statistics at one moment."""

    mean: Tensor
    var: Tensor
    num_batches: int  # num_batches_tracked


@dataclass(frozen=True)
class NormUpdate:
    """What a range did to a batch norm, beginning where every range begins: as registered."""

    momentum: float | None  # None averages all batches alike
    before: NormStatistics
    after: NormStatistics
    left_out: bool  # whether a shard was counted, and is not in the statistics: one without samples


@dataclass(frozen=True)
class RangeOutputs:
    """What the first pass of a range gave.

    A group that has no shard in the range has no entry in `outputs` and `rows`.
    """

    outputs: dict[str, Outputs]  # by group and name ("" where z is one tensor): rows of Z
    rows: dict[str, tuple[int | None, ...]]  # by group: rows of each shard, None where z is 0-dim
    penalties: Tensor  # float64, the penalties' values in the order of the calls
    norms: dict[str, NormUpdate]  # by module name, of those whose statistics the range changed
    seconds: float
    buffers: dict[str, Tensor] | None = None
    """All buffers after range 0, of that range alone, where they are asked for."""

    stateful: bool = True
    """Whether a second half needs what the range left in buffers; of a job for a later one."""

    changed_attributes: tuple[str, ...] = ()
    """Names of plain attributes that the range changed; of a job for a later one."""


@dataclass(frozen=True)
class EarlierOutputs:
    """A range's rows of Z that an earlier job returned, whose shards changed no buffer."""

    outputs: dict[str, Outputs]
    rows: dict[str, tuple[int | None, ...]]


@dataclass(frozen=True)
class RangeCotangents:
    """What the replay of a range needs.

    `cotangents` are rows of dL/dZ, by group and name as in `RangeOutputs.outputs`; a name that the
    loss does not reach is missing. `norms` is what one pass over all shards would have shown the
    range's first shard; empty for range 0, and where no statistics change.
    """

    cotangents: dict[str, Outputs]
    needed: tuple[Position, ...]  # shards that need a backward pass
    norms: dict[str, NormStatistics] = field(default_factory=dict)


@dataclass(frozen=True)
class RangeGradient:
    """What the replay of a range gave.

    `input_grads` are by position and argument, of the shards that had a backward pass.
    """

    sums: Sums
    parameters: dict[str, GradientForm]  # what is differentiated, in the parameters' order
    inputs: dict[str, tuple[str, ...]]  # by group: arguments whose gradients are wanted
    input_grads: dict[Position, dict[str, Tensor | None]]
    retained: int
    replayed: int
    replay_difference: float
    fallbacks: dict[str, int]  # see `MixedResult`
    recomputed: Recomputed
    seconds: float


class RangeDevice(Protocol):
    """One device that holds the job's model ready. It does one call after the other, in order.

    A future ends with an `EngineError` where the engine raised it, or with `DeviceLost`.
    """

    def forward(self, part: Range) -> Future[RangeOutputs]:
        """Put the range's shards through the model; their graphs wait for `replay`."""

    def resume(self, part: Range, earlier: EarlierOutputs) -> Future[None]:
        """Hold a range that an earlier job put through the model, in place of `forward`.

        Graphs that the device kept of it since then are used, as they are by `forward`.
        The device needs the range's shards for it as for `forward`.
        """

    def replay(self, part: Range, cotangents: RangeCotangents) -> Future[RangeGradient]:
        """Carry the cotangents back; `forward` or `resume` of the range came before, here."""

    def check(self, part: Range, norms: dict[str, NormStatistics]) -> Future[int]:
        """Check the range's first shard, see `independence`; the device keeps no more of it.

        For a job without a replay, which would do it; also after `forward` on this device.

        Returns:
            Of how many shards the device keeps the graphs for a later job.
        """


class Devices(Protocol):
    """The devices that a job has, and the place of what is computed between its phases."""

    def take(self, part: Range) -> RangeDevice:
        """Return a device for a range: first for each range in order, then for one that was lost.

        Raises:
            DeviceLost: there is none left.
        """

    def added(self, left: Sums, right: Sums) -> Future[Sums]:
        """Return left + right, see `reduction.added`; neither is used again.

        The future ends with `DeviceLost` where one of them is lost; both are computed again then.
        """

    def fetched(self, sums: Sums) -> Future[NamedSums]:
        """Bring sums to the leader."""

    def between_phases(self, step: Callable[[], T], precision: Precision) -> T:
        """Compute something of the leader's, see `split_job.between_phases`."""

    def tick(self, phase: Phase, done: int, total: int) -> None:
        """Hear how many shards of ranges that have ended are done, about once a second.

        May raise to stop the job.
        """
