"""The checkpoint of a mixed gradient.

    after shard i of the first pass      dfdz and the entries of v so far, and S₀ … Sᵢ₊₁
    after shard i of the tangent pass    these of all shards, dt/dy so far, and how many shards were
                                         added

t and ∂t/∂dfdz are not in it, for they are functions of dfdz.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint, Checkpoints
from gradbox_engine.mixed.phases import Equipment, MixedShard, TangentPass
from gradbox_engine.mixed.sums import LeafSums
from gradbox_engine.model.packed_snapshots import packed, unpacked
from gradbox_engine.model.shard_feed import Position
from gradbox_engine.replay.comparison import ReplayComparison


class MixedCheckpoint:
    """Writes a job's state where its checkpoints are kept, when they are due, and reads it."""

    def __init__(self, kept: Checkpoints, equipment: Equipment) -> None:
        """Read what an earlier process left."""
        self._kept, self._equipment = kept, equipment
        found = kept.read()
        self._found = Checkpoint() if found is None else found.to(equipment.ready.device)
        if self._found.facts:
            equipment.jacobians.argument = self._found.section("records").facts["argument"]

    def records(self) -> list[MixedShard]:
        """Return the shards that have been through the first pass."""
        if not self._found.facts:
            return []
        told = self._found.section("records")
        states = unpacked(self._found.section("buffers"), self._equipment.ready.buffers.first)
        sketches: list[dict[str, Tensor]] = [{} for _ in states[1:]]
        for key, entries in told.tensors.items():
            kind, index, name = key.split("/", 2)
            if kind == "v":
                sketches[int(index)][name] = entries
        return [
            MixedShard(
                Position(0, index),
                before=states[index],
                after=states[index + 1],
                sketch=sketch,
                dfdz=told.tensors[f"dfdz/{index}/"],
            )
            for index, sketch in enumerate(sketches)
        ]

    def went(self, sums: LeafSums) -> TangentPass:
        """Return how far the tangent pass came, and give the sums what they had; asked last."""
        found, self._found = self._found, Checkpoint()  # dfdz need not be held twice
        if "tangents" not in found:
            return TangentPass()
        sums.resume(found.section("sums"))
        return TangentPass(**found.section("tangents").facts)

    def after_first_call(self, records: Sequence[MixedShard]) -> None:
        """Write the state after a shard of the first pass, if it is time."""
        if self._kept.due():
            self._kept.write(Checkpoint.of_sections(**self._packed(records)))

    def after_tangent(
        self,
        records: Sequence[MixedShard],
        sums: LeafSums,
        went: TangentPass,
        comparison: ReplayComparison,
    ) -> None:
        """Write the state after a shard of the tangent pass, if it is time.

        Raises:
            ReplayMismatch: one of the shards so far differs from its first pass; no other process
                would compare them again.
        """
        if not self._kept.due():
            return
        went.difference = comparison.finish()
        self._kept.write(
            Checkpoint.of_sections(
                **self._packed(records),
                sums=sums.state(),
                tangents=Checkpoint({}, asdict(went)),
            )
        )

    def _packed(self, records: Sequence[MixedShard]) -> dict[str, Checkpoint]:
        tensors: dict[str, Tensor] = {}
        for index, record in enumerate(records):
            tensors[f"dfdz/{index}/"] = record.dfdz
            for name, entries in record.sketch.items():
                tensors[f"v/{index}/{name}"] = entries
        facts: dict[str, Any] = {"argument": self._equipment.jacobians.argument}
        states = [records[0].before, *(record.after for record in records)]
        return {"records": Checkpoint(tensors, facts), "buffers": packed(states)}
