"""The first calls of a mixed gradient: vᵢ, aᵢ and dfdzᵢ of a shard, through its own graph."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from gradbox_engine.errors import BadInputs
from gradbox_engine.mixed.prepared import PreparedMixed
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.comparison import sketch
from gradbox_engine.model.state.buffers import Snapshot
from gradbox_engine.replay.shard_record import ShardRecord

DFDZ = "dfdz"
"""What dfdz_i is called in a shard's record, beside the entries of v."""


class DerivativeCalls:
    """Takes v, a and dfdz of one shard after the other."""

    def __init__(self, job: PreparedMixed) -> None:
        self._job = job
        self._first: Tensor | None = None

    def __call__(self, position: Position, before: Snapshot, *, is_last: bool) -> ShardRecord:
        """Return dfdz and a sketch of v; the graph is freed."""
        cotangents = partial(self._job.inner.cotangents, position)
        outputs, dfdz = self._job.jacobians.transposed(position, cotangents)
        first = self._first = dfdz if self._first is None else self._first
        if dfdz.shape[1:] != first.shape[1:] or dfdz.dtype != first.dtype:
            raise BadInputs(
                f"{self._job.ready.calls.where(position)}: expected the z of all shards to have "
                f"one dtype and to differ in dim 0 alone, got {dfdz.dtype} {tuple(dfdz.shape)} "
                f"after {first.dtype} {tuple(first.shape)}; pad them to one shape"
            )
        kept = {**sketch(outputs), DFDZ: dfdz}
        return ShardRecord(position, kept, penalties=[], before=before, after=before)
