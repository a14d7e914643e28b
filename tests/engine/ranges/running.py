"""The problem table in ranges: on one device, and on several of which some die."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from gradbox_engine import DeviceLost, Group, SetGradient
from gradbox_engine.model.calling.shard_feed import all_positions
from gradbox_engine.ranges import (
    EarlierOutputs,
    HeldJob,
    NormStatistics,
    Range,
    RangeCotangents,
    RangeGradient,
    RangeOutputs,
    added,
    cut,
)
from gradbox_engine.ranges.one_device import done
from gradbox_engine.ranges.split_job import between_phases
from gradbox_engine.set_loss import held_job, set_gradient, split_set_gradient
from tests.cases import Case
from tests.device import DEVICE, same_bits
from tests.engine.replay.running import question

EXACT = 1e-12
"""How near a sum over ranges is to that over all shards, relative, in float64."""


def even(groups: Sequence[Group], num_ranges: int) -> tuple[Range, ...]:
    """Return ranges of the same number of shards."""
    return cut([1] * len(all_positions(groups)), num_ranges)


def in_ranges(
    case: Case, num_ranges: int, model: nn.Module | None = None, **terms: Any
) -> SetGradient:
    """Let one device answer a case in ranges; `terms` override the case's own."""
    groups, objective, told = question(case)
    model = (model or case.model()).to(DEVICE)
    parts = even(groups, num_ranges)
    return set_gradient(model, groups, objective, ranges=parts, **(told | terms))


def on_devices(
    case: Case,
    num_ranges: int,
    *,
    num_spare: int = 1,
    dies: Mapping[int, str] = {},
    **terms: Any,
) -> tuple[SetGradient, Devices]:
    """Let several devices answer a case, a range on each, with some to spare.

    Args:
        dies: see `Devices`.
        terms: override the case's own.
    """
    groups, objective, told = question(case)
    told |= terms
    names = tuple(objective.parameters)
    with held_by(case, groups, names, num_ranges + num_spare, told) as jobs:
        devices = Devices(jobs, dies=dies)
        told = {key: value for key, value in told.items() if key not in ("wrt", "retain")}
        parts = even(groups, num_ranges)
        return split_set_gradient(devices, parts, groups, objective, **told), devices


@contextmanager
def held_by(
    case: Case,
    groups: Sequence[Group],
    loss_parameters: Collection[str],
    number: int,
    told: dict[str, Any],
) -> Iterator[list[HeldJob]]:
    """Hold a case's job on several models of the same weights."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                held_job(
                    case.model().to(DEVICE),
                    groups,
                    loss_parameters=loss_parameters,
                    **told,
                )
            )
            for _ in range(number)
        ]


@dataclass
class Devices:
    """Several held jobs in one process.

    `dies` names which call each device does not live through, by its number: "forward", "check",
    "replay", "added", "fetched"; then all that it held is gone. Sums stay with the device that made
    them.
    """

    jobs: list[HeldJob]
    dies: Mapping[int, str]
    dead: set[int] = field(default_factory=set)
    calls: list[tuple[str, int]] = field(default_factory=list)
    given: int = 0

    def take(self, part: Range) -> Device:
        for _ in self.jobs:
            number = self.given % len(self.jobs)
            self.given += 1
            if number not in self.dead:
                return Device(self, number)
        raise DeviceLost("none left")

    def call(self, kind: str, number: int, function: Any, *arguments: Any) -> Future[Any]:
        self.calls.append((kind, number))
        if self.dies.get(number) == kind:
            self.dead.add(number)
        if number in self.dead:
            future: Future[Any] = Future()
            future.set_exception(DeviceLost(f"device {number} died in {kind}"))
            return future
        return done(function, *arguments)

    def added(self, left: Any, right: Any) -> Future[Any]:
        if right[0] in self.dead:
            left, right = right, left
        return self.call("added", left[0], lambda: (left[0], added(left[1], right[1])))

    def between_phases(self, step: Any, precision: Any) -> Any:
        return between_phases(step, precision)

    def tick(self, phase: Any, done: int, total: int) -> None:
        """Nobody listens."""

    def fetched(self, sums: Any) -> Future[Any]:
        return self.call("fetched", sums[0], lambda: sums[1])


@dataclass
class Device:
    """One of them."""

    devices: Devices
    number: int

    @property
    def job(self) -> HeldJob:
        return self.devices.jobs[self.number]

    def forward(self, part: Range) -> Future[RangeOutputs]:
        return self.devices.call("forward", self.number, self.job.forward, part)

    def resume(self, part: Range, earlier: EarlierOutputs) -> Future[None]:
        return self.devices.call("resume", self.number, self.job.resume, part, earlier)

    def check(self, part: Range, norms: dict[str, NormStatistics]) -> Future[None]:
        return self.devices.call("check", self.number, self.job.check, part, norms)

    def replay(self, part: Range, cotangents: RangeCotangents) -> Future[RangeGradient]:
        def held() -> RangeGradient:
            found = self.job.replay(part, cotangents)
            return replace(found, sums=(self.number, found.sums))

        return self.devices.call("replay", self.number, held)


def same_result(a: SetGradient, b: SetGradient) -> bool:
    """Return whether two results have the same loss, gradients and buffers, in every bit."""
    return (
        a.loss == b.loss
        and a.unreached == b.unreached
        and _same(a.grads, b.grads)
        and _same(a.buffers or {}, b.buffers or {})
    )


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)
