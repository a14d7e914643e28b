"""`split_set_gradient`: one set-loss job over ranges of its shards, wherever these run.

    each range r:  Z_r = f(x_i; θ), i in r                     RangeDevice.forward
    Z = cat(Z₁ … Z_k),  L = g(Z, extras),  z̄ = ∂L/∂Z           cotangents
    each range r:  G_r = Σ_{i in r} z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ           RangeDevice.replay
    dL/dθ = Σ_r G_r                                            reduction

The result depends on the ranges and not on which device ran which, or when: it is that of
`in_process` over the same ranges to the last bit, where devices compute alike. With one range it is
that of `set_gradient`.

A range whose device is lost runs again on another one. If its outputs had been used, those of the
second time are compared with them, like a replay with its first pass.

Cost: `set_gradient`'s over k devices, and for every range but the first at most one forward more,
see `independence`. Between devices: Z and ∂L/∂Z once, and k sums of gradients.

Not supported: checkpoints. A job whose coordinator ends begins again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from gradbox_engine.errors import DeviceLost
from gradbox_engine.model.outputs import Outputs
from gradbox_engine.model.precision import arithmetic
from gradbox_engine.model.shard_feed import Position, all_positions
from gradbox_engine.model.shard_rng import generators_restored
from gradbox_engine.ranges import norm_statistics
from gradbox_engine.ranges.courses import Course, run_together
from gradbox_engine.ranges.protocol import (
    Devices,
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
from gradbox_engine.replay.comparison import ReplayComparison
from gradbox_engine.replay.cotangents import LossDerivatives, differentiate, nonzero
from gradbox_engine.replay.input_gradients import collect
from gradbox_engine.replay.phase_timer import PhaseTimer
from gradbox_engine.replay.set_gradient import GRADS_ALONE, refuse_shared_names
from gradbox_engine.replay.z import ShardRows, check_alike
from gradbox_engine.requests import (
    CallKeywords,
    CallOptions,
    Group,
    Objective,
    Observer,
    Phase,
    Returned,
    SetGradient,
    Silent,
)

HOST = torch.device("cpu")


@dataclass(frozen=True)
class RangeRun:
    """How one range went."""

    start: int
    stop: int
    forward_s: float
    replay_s: float
    devices_lost: int
    rerun_difference: float  # largest |z' − z| / max |z| of a shard between two devices


@dataclass(frozen=True, kw_only=True)
class SplitGradient(SetGradient):
    """What `set_gradient` returns, and the ranges it was computed in."""

    ranges: tuple[RangeRun, ...]


def split_set_gradient(
    devices: Devices,
    parts: Sequence[Range],
    groups: Sequence[Group],
    objective: Objective,
    *,
    returns: Collection[Returned] = GRADS_ALONE,
    device: torch.device = HOST,
    observer: Observer | None = None,
    **options: Unpack[CallKeywords],
) -> SplitGradient:
    """Return dL/dθ for L = g(Z, extras) + Σ penalties.

    Args:
        devices: each holds the job ready, see `held_job`, with the same groups and options.
        parts: ranges that cover all shards in order, see `cut`.
        groups: of the whole job; their shards' tensors are looked at where a gradient with
            respect to an input is zero.
        objective: g; it runs here.
        returns: as in `set_gradient`; `held_job` has to be told, too.
        device: where g runs.
        observer: told about shards of ranges that have ended, and about once a second besides.

    Raises:
        CoupledShards: the shards cannot be split; the job runs in one range.
        DeviceLost: no device is left.
        ReplayMismatch: a range that ran twice did not give the same outputs.
        EngineError: see `errors`.
    """
    told = CallOptions(**options)
    job = _SplitJob(devices, parts, groups, told, observer or Silent())
    clock = PhaseTimer(device)
    with torch.inference_mode(False), generators_restored(), arithmetic(told.precision):
        with clock.timed("forward"):
            job.forward()
        with clock.timed("cotangents"):
            loss = _differentiated(job, objective, device=device)
        with clock.timed("replay"):
            sums = job.replay(loss)
    return _result(job, loss, sums, clock, returns, device=device)


class _SplitJob:
    """The ranges of a job on their way through both phases."""

    def __init__(
        self,
        devices: Devices,
        parts: Sequence[Range],
        groups: Sequence[Group],
        options: CallOptions,
        observer: Observer,
    ) -> None:
        self.groups = groups
        self.parts = parts
        self.options = options
        self.observer = observer
        self.positions = all_positions(groups)
        self.outputs: dict[int, RangeOutputs] = {}
        self.gradients: dict[int, RangeGradient] = {}
        self.lost = dict.fromkeys(range(len(parts)), 0)
        self.rerun_difference = dict.fromkeys(range(len(parts)), 0.0)
        self._devices = devices
        self._device: dict[int, RangeDevice] = {}
        self._cotangents: dict[int, RangeCotangents] = {}

    def forward(self) -> None:
        """Run the first pass of all ranges."""
        courses = [self._forward(part) for part in self.parts]
        gathered = run_together(courses, tick=lambda ended: self._tell("forward", ended))
        self.outputs = dict(enumerate(gathered))

    def replay(self, loss: LossDerivatives) -> NamedSums:
        """Run the replay of all ranges, and add up."""
        starts, _ = norm_statistics.composed([self.outputs[p.index].norms for p in self.parts])
        parts_of_z = ShardRows(self.groups, self.num_rows()).parts(loss.cotangents)
        needed = parts_of_z if self.options.penalties else nonzero(parts_of_z)
        given = _by_range(self, loss)
        for part, norms in zip(self.parts, starts, strict=True):
            wanted = tuple(p for p in self.positions[part.start : part.stop] if p in needed)
            self._cotangents[part.index] = RangeCotangents(given[part.index], wanted, norms)
        courses = [self._replay(part) for part in self.parts]
        run_together(courses, tick=lambda ended: self._tell("replay", ended))
        nodes: list[tuple[Sequence[Range], Sums]] = [
            ([part], self.gradients[part.index].sums) for part in self.parts
        ]
        while len(nodes) > 1:
            pairs = list(zip(nodes[::2], nodes[1::2], strict=False))
            sums = run_together([self._added(left, right) for left, right in pairs])
            rest = nodes[2 * len(pairs) :]
            nodes = [
                ([*left[0], *right[0]], total)
                for (left, right), total in zip(pairs, sums, strict=True)
            ] + rest
        return run_together([self._fetched(nodes[0][1])])[0]

    def num_rows(self) -> dict[str, list[int | None]]:
        """Return each shard's number of rows in Z, by group."""
        return {
            group.name: [
                number for part in self.parts for number in self._rows(part).get(group.name, ())
            ]
            for group in self.groups
        }

    def _rows(self, part: Range) -> dict[str, tuple[int | None, ...]]:
        return self.outputs[part.index].rows

    def _forward(self, part: Range) -> Course[RangeOutputs]:
        while True:
            device = self._devices.take(part)
            try:
                outputs: RangeOutputs = yield device.forward(part)
            except DeviceLost:
                self.lost[part.index] += 1
                continue
            self._device[part.index] = device
            return outputs

    def _replay(self, part: Range) -> Course[None]:
        while True:
            try:
                found = yield self._device[part.index].replay(part, self._cotangents[part.index])
                self.gradients[part.index] = found
                return
            except DeviceLost:
                self.lost[part.index] += 1
                yield from self._forward_again(part)

    def _forward_again(self, part: Range) -> Course[None]:
        """Put a range through another device, and compare with what the first one gave."""
        again = yield from self._forward(part)
        comparison = ReplayComparison(
            self.options.precision, largest=self.rerun_difference[part.index]
        )
        first_parts = self._by_shard(part, self.outputs[part.index])
        for position, outputs in self._by_shard(part, again).items():
            where = f"group {self.groups[position.group].name!r}, shard {position.shard}"
            comparison.compare(f"{where}, on another device", outputs, first_parts[position])
        self.rerun_difference[part.index] = comparison.finish()

    def _by_shard(self, part: Range, outputs: RangeOutputs) -> dict[Position, Outputs]:
        positions = self.positions[part.start : part.stop]
        return ShardRows(self.groups, outputs.rows, positions=positions).parts(outputs.outputs)

    def _added(
        self, left: tuple[Sequence[Range], Sums], right: tuple[Sequence[Range], Sums]
    ) -> Course[Sums]:
        """Add the sums of neighbouring ranges; where one is lost, compute all of them again."""
        try:
            total: Sums = yield self._devices.added(left[1], right[1])
        except DeviceLost:
            total = yield from self._computed_again([*left[0], *right[0]])
        return total

    def _fetched(self, sums: Sums) -> Course[NamedSums]:
        while True:
            try:
                named: NamedSums = yield self._devices.fetched(sums)
                return named
            except DeviceLost:
                sums = yield from self._computed_again(self.parts)

    def _computed_again(self, parts: Sequence[Range]) -> Course[Sums]:
        """Run both phases of ranges whose sum is lost, and add them up in the same tree."""
        if len(parts) == 1:
            self.lost[parts[0].index] += 1
            yield from self._forward_again(parts[0])
            yield from self._replay(parts[0])
            return self.gradients[parts[0].index].sums
        left, right = split_in_tree(parts)
        left_sums = yield from self._computed_again(left)
        right_sums = yield from self._computed_again(right)
        return (yield from self._added((left, left_sums), (right, right_sums)))

    def _tell(self, phase: Phase, ended: Sequence[int]) -> None:
        done = sum(self.parts[number].num_shards for number in ended)
        self.observer.step(phase, done, len(self.positions))


def _differentiated(
    job: _SplitJob, objective: Objective, *, device: torch.device
) -> LossDerivatives:
    job.observer.step("cotangents", 0, 1)
    gathered = [job.outputs[part.index] for part in job.parts]
    refuse_shared_names(gathered[0].parameters, objective)
    penalties = torch.cat([outputs.penalties for outputs in gathered])
    loss = differentiate(
        objective,
        _joined(job, device=device),
        job.groups,
        device=device,
        seed=job.options.seed,
        widened=job.options.widened,
        penalty=float(penalties.sum()) if len(penalties) else 0.0,
    )
    job.observer.step("cotangents", 1, 1)
    return loss


def _joined(job: _SplitJob, *, device: torch.device) -> dict[str, Outputs]:
    """Return Z of each group, of the ranges' parts in order.

    Raises:
        BadOutput: shards of one group differ in names, dtypes or trailing dimensions.
    """
    whole: dict[str, Outputs] = {}
    for group in job.groups:
        found: list[Outputs] = []
        shard = 0
        for outputs in (job.outputs[part.index] for part in job.parts):
            if group.name in outputs.outputs:
                found.append(outputs.outputs[group.name])
                check_alike(group.name, shard, found[-1], found[0])
                shard += len(outputs.rows[group.name])
        whole[group.name] = {
            name: _cat([named[name] for named in found]).to(device) for name in found[0]
        }
    return whole


def _by_range(job: _SplitJob, loss: LossDerivatives) -> dict[int, dict[str, Outputs]]:
    """Return each range's rows of dL/dZ, without the names that the loss does not reach."""
    begin = dict.fromkeys(loss.cotangents, 0)
    given: dict[int, dict[str, Outputs]] = {}
    for part in job.parts:
        given[part.index] = {}
        for group, rows in job.outputs[part.index].rows.items():
            end = begin[group] + sum(1 if number is None else number for number in rows)
            given[part.index][group] = {
                name: tensor[begin[group] : end].cpu()
                for name, tensor in loss.cotangents[group].items()
                if tensor is not None
            }
            begin[group] = end
    return given


def _result(
    job: _SplitJob,
    loss: LossDerivatives,
    sums: NamedSums,
    clock: PhaseTimer,
    returns: Collection[Returned],
    *,
    device: torch.device,
) -> SplitGradient:
    outputs = [job.outputs[part.index] for part in job.parts]
    gradients = [job.gradients[part.index] for part in job.parts]
    input_grads, unreached_inputs = collect(
        job.groups,
        outputs[0].inputs,
        {p: named for gradient in gradients for p, named in gradient.input_grads.items()},
        device=device,
    )
    parameters = outputs[0].parameters
    grads = {
        name: sums[name] if name in sums else torch.zeros(form.shape, dtype=form.dtype)
        for name, form in parameters.items()
    }
    _, norms = norm_statistics.composed([found.norms for found in outputs])
    return SplitGradient(
        loss=loss.loss,
        grads=grads | loss.parameters,
        unreached=(
            *(name for name in parameters if name not in sums),
            *unreached_inputs,
            *loss.unreached,
        ),
        shards={group.name: len(group.shards) for group in job.groups},
        retained=sum(gradient.retained for gradient in gradients),
        replayed=sum(gradient.replayed for gradient in gradients),
        replay_difference=max(gradient.replay_difference for gradient in gradients),
        seconds=clock.seconds,
        buffers=_buffers(outputs[0], norms) if "buffers" in returns else None,
        outputs=loss.seen if "outputs" in returns else None,
        cotangents=loss.seen_cotangents if "cotangents" in returns else None,
        input_grads=input_grads or None,
        ranges=tuple(_run(job, part) for part in job.parts),
    )


def _run(job: _SplitJob, part: Range) -> RangeRun:
    return RangeRun(
        start=part.start,
        stop=part.stop,
        forward_s=job.outputs[part.index].seconds,
        replay_s=job.gradients[part.index].seconds,
        devices_lost=job.lost[part.index],
        rerun_difference=job.rerun_difference[part.index],
    )


def _buffers(first: RangeOutputs, norms: dict[str, NormStatistics]) -> dict[str, Tensor]:
    """Return the buffers after all ranges: of range 0 those that do not change."""
    return (first.buffers or {}) | norm_statistics.named(norms)


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
