"""A mixed gradient on one device, held open between its first pass and its tangent pass.

As in `held_job`, ranges may follow each other on one device, each begins with the registered
buffers and has a checkpoint of its own, and shards outside of a device's ranges may hold `meta`
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn

from gradbox_engine.checkpoint import Checkpoints, NoCheckpoints
from gradbox_engine.errors import BadInputs
from gradbox_engine.mixed.first_pass import DFDZ, first_pass, sketch
from gradbox_engine.mixed.prepared import PreparedMixed, prepared_mixed
from gradbox_engine.mixed.sums import LeafSums
from gradbox_engine.mixed.tangents import TangentProgress, tangent_pass
from gradbox_engine.model.calling.outputs import BARE
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.ranges import norm_statistics
from gradbox_engine.ranges.independence import check_independence, compared_by_replay
from gradbox_engine.ranges.protocol import (
    EarlierOutputs,
    GradientForm,
    NormStatistics,
    Range,
    RangeCotangents,
    RangeGradient,
    RangeOutputs,
)
from gradbox_engine.replay.checkpoint import JobCheckpoint
from gradbox_engine.replay.phase_timer import PhaseTimer
from gradbox_engine.replay.shard_record import ShardRecord, any_changed_state
from gradbox_engine.replay.z import ShardRows, concatenated
from gradbox_engine.requests import (
    CallKeywords,
    Group,
    Objective,
    Observer,
)


@dataclass(frozen=True, kw_only=True)
class DirectionsOfRange(RangeCotangents):
    """What the tangent pass of a range needs: u for cotangents, and two things besides.

    `largest` is the largest ‖dfdz_i‖‖u_i‖ of all shards. `direct` is ∂outer/∂y, with which the sum
    of range 0 begins.
    """

    largest: Tensor
    direct: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RangeTangents(RangeGradient):
    """What the tangent pass of a range gave."""

    fallbacks: dict[str, int]  # see `MixedResult`


@contextmanager
def held_mixed(
    model: nn.Module,
    group: Group,
    inner: Objective,
    leaves: Mapping[str, Tensor],
    *,
    z: str | None = None,
    observer: Observer | None = None,
    checkpoints: Callable[[Range], Checkpoints] = lambda _: NoCheckpoints(),
    **options: Unpack[CallKeywords],
) -> Iterator[HeldMixed]:
    """Hold a model ready for ranges of a job; it is bit-identical afterwards.

    The arguments are those of `mixed_gradient`, and the same on every device.

    Args:
        leaves: y by name, those that outer alone reads too.
        checkpoints: where the state of a range is written, and read when it begins again.
    """
    with prepared_mixed(model, group, inner, leaves, z=z, observer=observer, **options) as job:
        yield HeldMixed(job, group, leaves, checkpoints)


@dataclass(frozen=True)
class HeldRange:
    """What a device keeps of a range between its two passes; `progress` is of the second."""

    records: list[ShardRecord]
    checkpoint: JobCheckpoint
    sums: LeafSums
    progress: TangentProgress


class HeldMixed:
    """The two phases, over any ranges; see `RangeDevice`."""

    def __init__(
        self,
        job: PreparedMixed,
        group: Group,
        leaves: Mapping[str, Tensor],
        checkpoints: Callable[[Range], Checkpoints],
    ) -> None:
        self._job, self._ready = job, job.ready
        self._group, self._leaves = group, leaves
        self._checkpoints = checkpoints
        self._held: dict[int, HeldRange] = {}

    def forward(self, part: Range) -> RangeOutputs:
        """Take v, a and dfdz of a range's shards; the outputs are dfdz.

        Raises:
            CoupledShards: they changed a buffer, and the job has other ranges.
            EngineError: see `mixed_gradient`.
        """
        clock = PhaseTimer(*self._ready.devices)
        with clock.timed("forward"):
            sums = LeafSums(self._leaves)
            checkpoint = JobCheckpoint(self._checkpoints(part), self._ready, sums, compared=sketch)
            resumed = checkpoint.resumed()
            progress = TangentProgress.of(resumed.second)
            records = first_pass(
                self._job,
                resumed.records,
                shards=range(part.start, part.stop),
                after_shard=checkpoint.after_first_call,
            )
            norms = {} if part.is_whole else norm_statistics.updates(self._ready, records)
            parts = {record.position: {BARE: record.outputs[DFDZ]} for record in records}
            whole, num_rows = concatenated([self._group], parts)
            for record in records:
                record.outputs[DFDZ] = parts[record.position][BARE]  # a view of the whole
        self._held[part.index] = HeldRange(records, checkpoint, sums, progress)
        return RangeOutputs(
            outputs={group: {BARE: named[BARE].cpu()} for group, named in whole.items()},
            rows={group: tuple(numbers) for group, numbers in num_rows.items()},
            penalties=torch.zeros(0, dtype=torch.float64),
            norms=norms,
            parameters=frozenset(self._leaves),
            stateful=any_changed_state(records),
            seconds=clock.seconds["forward"],
        )

    def replay(self, part: Range, cotangents: RangeCotangents) -> RangeTangents:
        """Add ∂⟨a_i(y, v_i), J_i u_i⟩/∂y over a range's shards; nothing of it is kept.

        Raises:
            CoupledShards: the range's shards depend on the shards before them.
            ReplayMismatch: a shard's v differs from that of the first pass.
            EngineError: see `mixed_gradient`.
        """
        assert isinstance(cotangents, DirectionsOfRange)
        held, clock = self._held[part.index], PhaseTimer(*self._ready.devices)
        records, sums, progress = held.records, held.sums, held.progress
        with clock.timed("replay"), self._ready.changes.refused():
            if cotangents.norms or not compared_by_replay(records[0], cotangents):
                self._check(part, cotangents.norms)
            if not progress.num_done:
                sums.add({name: g.to(self._ready.device) for name, g in cotangents.direct.items()})
            tangent_pass(
                self._job,
                records,
                self._directions(part, cotangents),
                sums,
                progress=progress,
                largest=cotangents.largest.to(self._ready.device),
                after_shard=partial(held.checkpoint.after_second_call, records),
            )
        del self._held[part.index]
        unreached = sums.unreached()
        named = sums.named()
        return RangeTangents(
            sums={name: tensor for name, tensor in named.items() if name not in unreached},
            parameters={n: GradientForm(tuple(x.shape), x.dtype) for n, x in named.items()},
            inputs={},
            input_grads={},
            retained=0,
            replayed=progress.num_done,
            replay_difference=progress.difference,
            seconds=clock.seconds["replay"],
            fallbacks=progress.fallbacks,
        )

    def resume(self, part: Range, earlier: EarlierOutputs) -> None:
        """A mixed gradient is in one job.

        Raises:
            BadInputs: always.
        """
        raise BadInputs("mixed gradient: expected its first pass in the same job, got outputs")

    def check(self, part: Range, norms: dict[str, NormStatistics]) -> int:
        """Put the range's first shard through the model once more; nothing of it is kept.

        Returns:
            0, for graphs that are kept.

        Raises:
            CoupledShards: the range's shards depend on the shards before them.
        """
        with self._ready.changes.refused():
            self._check(part, norms)
        del self._held[part.index]
        return 0

    def _check(self, part: Range, norms: Mapping[str, NormStatistics]) -> None:
        if part.index > 0:
            first = self._held[part.index].records[0]
            updates = norm_statistics.updates(self._ready, [first])
            entries = {name: value for name, value in first.outputs.items() if name != DFDZ}
            check_independence(
                self._ready, first, norms, updates, expected=entries, compared=sketch
            )

    def _directions(self, part: Range, cotangents: RangeCotangents) -> dict[Position, Tensor]:
        """Return u of the shards that need a tangent."""
        records = self._held[part.index].records
        num_rows = {self._group.name: [_num_rows(record) for record in records]}
        positions = [record.position for record in records]
        rows = ShardRows([self._group], num_rows, positions=positions)
        parts = rows.parts(cotangents.cotangents)
        return {
            position: parts[position][BARE].to(self._ready.device) for position in cotangents.needed
        }


def _num_rows(record: ShardRecord) -> int | None:
    dfdz = record.outputs[DFDZ]
    return dfdz.shape[0] if dfdz.ndim else None
