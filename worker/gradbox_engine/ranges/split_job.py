"""The ranges of a job on their way through both phases, each on the device that it was given.

A range whose device is lost runs again on another one. If its outputs had been used, those of the
second time are compared with them, like a replay with its first pass. Sums that are lost while they
are added up are computed again from the ranges that are in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import torch

from gradbox_engine.errors import DeviceLost
from gradbox_engine.model.calling.shard_feed import all_positions
from gradbox_engine.model.calling.shard_rng import generators_restored
from gradbox_engine.model.comparison import ReplayComparison
from gradbox_engine.model.precision import arithmetic
from gradbox_engine.ranges import norm_statistics
from gradbox_engine.ranges.coroutines import Coroutine, LostDevices, on_some_device, run_together
from gradbox_engine.ranges.joining import compare
from gradbox_engine.ranges.protocol import (
    Devices,
    EarlierOutputs,
    NamedSums,
    NormStatistics,
    Range,
    RangeCotangents,
    RangeDevice,
    RangeGradient,
    RangeOutputs,
    Sums,
)
from gradbox_engine.ranges.reduction import split_in_tree
from gradbox_engine.requests import Group, Phase, Precision, RangeRun

T = TypeVar("T")


class PartialSum(NamedTuple):
    """A sum in the tree, and the ranges that are in it."""

    parts: Sequence[Range]
    sums: Sums


class SplitJob:
    """Both phases of a job's ranges, on devices that may be lost."""

    def __init__(
        self,
        devices: Devices,
        parts: Sequence[Range],
        groups: Sequence[Group],
        *,
        precision: Precision,
    ) -> None:
        self._parts = parts
        self._lost = LostDevices()
        self._rerun_difference = [0.0] * len(parts)
        self._devices = devices
        self._groups = groups
        self._positions = all_positions(groups)
        self._precision = precision
        self._device: dict[int, RangeDevice] = {}
        self._outputs: list[RangeOutputs] = []
        self._earlier: Sequence[EarlierOutputs] = ()
        self._cotangents: Sequence[RangeCotangents] = ()
        self._gradients: dict[int, RangeGradient] = {}
        self._kept: list[int] = []  # by range, see `check`

    def forward(self) -> list[RangeOutputs]:
        """Run the first pass of all ranges.

        Raises:
            DeviceLost: no device is left, or one range has lost too many.
            EngineError: see `HeldJob.forward`.
        """
        passes = [self._forward(part) for part in self._parts]
        self._outputs = run_together(passes, tick=lambda ended: self._tell("forward", ended))
        return self._outputs

    def resume(self, earlier: Sequence[EarlierOutputs]) -> None:
        """Take up all ranges from outputs of an earlier job, in place of `forward`.

        Raises:
            DeviceLost: no device is left, or one range has lost too many.
        """
        self._earlier = earlier
        run_together([self._resume(part) for part in self._parts])

    def check(self) -> None:
        """Check that no range depends on another; for a job that ends with its first pass.

        Graphs that are for a later job wait on the devices from here on.

        Raises:
            CoupledShards: one does.
            DeviceLost: no device is left, or one range has lost too many.
        """
        starts, _ = norm_statistics.composed([outputs.norms for outputs in self._outputs])
        self._kept = run_together([self._check(part, starts[part.index]) for part in self._parts])

    def replay(self, cotangents: Sequence[RangeCotangents]) -> list[RangeGradient]:
        """Run the replay of all ranges, on the devices that hold them.

        Raises:
            DeviceLost: no device is left, or one range has lost too many.
            ReplayMismatch: a range that ran twice did not give the same outputs.
            EngineError: see `HeldJob.replay`.
        """
        self._cotangents = cotangents
        replays = [self._replay(part) for part in self._parts]
        return run_together(replays, tick=lambda ended: self._tell("replay", ended))

    def total(self) -> NamedSums:
        """Add up the sums of all ranges, in the tree of `reduction`.

        Raises: as `replay`.
        """
        nodes = [PartialSum([part], self._gradients[part.index].sums) for part in self._parts]
        while len(nodes) > 1:
            pairs = list(zip(nodes[::2], nodes[1::2], strict=False))
            added = run_together([self._added(left, right) for left, right in pairs])
            nodes = [*added, *nodes[2 * len(pairs) :]]
        return run_together([self._fetched(nodes[0])])[0]

    def runs(self) -> tuple[RangeRun, ...]:
        """Return how each range went, so far."""
        return tuple(
            RangeRun(
                start=part.start,
                stop=part.stop,
                forward_s=self._outputs[part.index].seconds if self._outputs else 0.0,
                replay_s=done.seconds if (done := self._gradients.get(part.index)) else 0.0,
                devices_lost=self._lost.of(part),
                retained=done.retained if done else self._kept[part.index] if self._kept else 0,
                rerun_difference=self._rerun_difference[part.index],
            )
            for part in self._parts
        )

    def _forward(self, part: Range) -> Coroutine[RangeOutputs]:
        return on_some_device(part, self._take, lambda d, part: d.forward(part), self._lost)

    def _resume(self, part: Range) -> Coroutine[None]:
        earlier = self._earlier[part.index]
        return on_some_device(part, self._take, lambda d, part: d.resume(part, earlier), self._lost)

    def _take(self, part: Range) -> RangeDevice:
        device = self._device[part.index] = self._devices.take(part)
        return device

    def _check(self, part: Range, norms: dict[str, NormStatistics]) -> Coroutine[int]:
        return self._where_held(part, lambda device: device.check(part, norms))

    def _replay(self, part: Range) -> Coroutine[RangeGradient]:
        cotangents = self._cotangents[part.index]
        gradient = yield from self._where_held(part, lambda device: device.replay(part, cotangents))
        self._gradients[part.index] = gradient
        return gradient

    def _where_held(self, part: Range, call: Callable[[RangeDevice], Future[T]]) -> Coroutine[T]:
        """Make a call on the device that holds a range; if it is lost, on one that then does."""
        while True:
            try:
                answer: T = yield call(self._device[part.index])
            except DeviceLost as error:
                self._lost.count(part, error)
                yield from self._begin_again(part)
            else:
                return answer

    def _begin_again(self, part: Range) -> Coroutine[None]:
        """Give a range to another device, and compare its first pass with the first one's."""
        if self._earlier:
            yield from self._resume(part)
            return
        again = yield from self._forward(part)
        comparison = ReplayComparison(self._precision, largest=self._rerun_difference[part.index])
        first = self._outputs[part.index]
        compare(comparison, self._groups, part, again, first, where="on another device")
        self._rerun_difference[part.index] = comparison.finish()

    def _added(self, left: PartialSum, right: PartialSum) -> Coroutine[PartialSum]:
        """Add the sums of neighbours; where one is lost, compute both again."""
        parts = [*left.parts, *right.parts]
        try:
            total: Sums = yield self._devices.added(left.sums, right.sums)
        except DeviceLost as error:
            return (yield from self._computed_again(parts, error))
        return PartialSum(parts, total)

    def _fetched(self, node: PartialSum) -> Coroutine[NamedSums]:
        while True:
            try:
                named: NamedSums = yield self._devices.fetched(node.sums)
            except DeviceLost as error:
                node = yield from self._computed_again(node.parts, error)
            else:
                return named

    def _computed_again(self, parts: Sequence[Range], error: DeviceLost) -> Coroutine[PartialSum]:
        """Run both phases of ranges whose sum is lost, and add up in the same tree."""
        if len(parts) == 1:
            self._lost.count(parts[0], error)
            yield from self._begin_again(parts[0])
            gradient = yield from self._replay(parts[0])
            return PartialSum(parts, gradient.sums)
        halves = split_in_tree(parts)
        left = yield from self._computed_again(halves[0], error)
        right = yield from self._computed_again(halves[1], error)
        return (yield from self._added(left, right))

    def _tell(self, phase: Phase, ended: Sequence[int]) -> None:
        done = sum(self._parts[number].num_shards for number in ended)
        self._devices.tick(phase, done, len(self._positions))


def between_phases(step: Callable[[], T], precision: Precision) -> T:
    """Run a step where no model is prepared: in the job's arithmetic, generators put back after."""
    with torch.inference_mode(False), generators_restored(), arithmetic(precision):
        return step()
