"""A mixed gradient held open on one device: what is done with a shard in either phase.

The phases are those of a set loss, so the protocol is too: dfdz takes the place of Z, u = ∂t/∂dfdz
that of the cotangents, and the sums are of gradients by y.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Unpack

from torch import Tensor, nn

from gradbox_engine.checkpoint import Checkpoints, NoCheckpoints
from gradbox_engine.mixed.first_pass import DFDZ, DerivativeCalls
from gradbox_engine.mixed.prepared import PreparedMixed, prepared_mixed
from gradbox_engine.mixed.tangents import TangentProgress, tangent_pass
from gradbox_engine.model.calling.outputs import BARE, Outputs
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.comparison import sketch
from gradbox_engine.model.prepared import Prepared
from gradbox_engine.ranges.held_job import HeldJob, HeldRange
from gradbox_engine.ranges.protocol import Range, RangeCotangents
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.shard_record import ShardRecord
from gradbox_engine.replay.z import NumRows, concatenated
from gradbox_engine.requests import CallKeywords, Group, Objective, Observer


@dataclass(frozen=True, kw_only=True)
class DirectionsOfRange(RangeCotangents):
    """What the tangent pass of a range needs: u for cotangents, and two things besides.

    `largest` is the largest ‖dfdz_i‖‖u_i‖ of all shards. `direct` is ∂outer/∂y, with which the sum
    of range 0 begins.
    """

    largest: Tensor
    direct: dict[str, Tensor] = field(default_factory=dict)


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
) -> Iterator[HeldJob]:
    """Hold a model ready for ranges of a job; it is bit-identical afterwards.

    The arguments are those of `mixed_gradient`, and the same on every device.

    Args:
        leaves: y by name, those that outer alone reads too.
        checkpoints: see `HeldJob`.
    """
    with prepared_mixed(model, group, inner, leaves, z=z, observer=observer, **options) as job:
        yield HeldJob(MixedPasses(job, leaves), checkpoints)


@dataclass(frozen=True)
class MixedPasses:
    """See `ranges.held_job.Passes`: dfdz forward, and ∂⟨a_i(y, v_i), J_i u_i⟩/∂y back."""

    job: PreparedMixed
    parameters: Mapping[str, Tensor]  # y

    @property
    def ready(self) -> Prepared:
        """The model."""
        return self.job.ready

    @property
    def observer(self) -> Observer:
        """The job's."""
        return self.job.observer

    def sums(self) -> GradientSums:
        """Return one for each leaf."""
        return GradientSums(self.parameters)

    def first_call(self, num_shards: int) -> DerivativeCalls:
        """Return calls that keep no graph."""
        return DerivativeCalls(self.job)

    def joined(self, records: Sequence[ShardRecord]) -> tuple[dict[str, Outputs], NumRows]:
        """Return dfdz of the range, of which the records then hold views."""
        parts = {record.position: {BARE: record.outputs[DFDZ]} for record in records}
        whole, num_rows = concatenated(self.ready.calls.groups, parts)
        for record in records:
            record.outputs[DFDZ] = parts[record.position][BARE]
        return whole, num_rows

    def second_pass(
        self, held: HeldRange, needed: Mapping[Position, Outputs], asked: RangeCotangents
    ) -> TangentProgress:
        """Take the tangents of the range, and contract them."""
        assert isinstance(held.sums, GradientSums)
        assert isinstance(asked, DirectionsOfRange)
        progress, device = TangentProgress.of(held.second), self.ready.device
        if not progress.num_done:
            held.sums.add({name: g.to(device) for name, g in asked.direct.items()})
        tangent_pass(
            self.job,
            held.records,
            {position: part[BARE] for position, part in needed.items()},
            held.sums,
            progress=progress,
            largest=asked.largest.to(device),
            after_shard=partial(held.checkpoint.after_second_call, held.records),
        )
        return progress

    def keep_no_graphs(self) -> None:
        """Do nothing: none is kept."""

    def compared(self, outputs: Outputs) -> Outputs:
        """Return some entries of v."""
        return sketch(outputs)

    def first_compared(self, record: ShardRecord) -> Outputs:
        """Return the same entries."""
        return {name: entries for name, entries in record.outputs.items() if name != DFDZ}
