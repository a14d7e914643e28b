"""What a device is sent of a wide job: the job, its shards in blocks, and other tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import ray
import torch
from torch import Tensor

from gradbox.protocol import ShardRef, TensorRef
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.requests import Shard
from gradbox_worker.cluster.exchange.array_buffers import TensorBuffer, as_tensors
from gradbox_worker.files.blob_tensors import TensorForm
from gradbox_worker.work import Work

ShardBlock = dict[Position, dict[str, TensorBuffer]]
"""Shards that travel together."""


@dataclass(frozen=True, kw_only=True)
class RangeJob:
    """What every device of a wide job is told.

    Attributes:
        of_samples: whether its ranges are of samples, which need no phases.
        loss_parameters: names that `wrt` may match besides the model's.
        tensors: what the spec names that devices need, but inputs.
        forms: by group, what is known of every shard: its arguments' dtypes and shapes.
        checkpoints: the folder of the box for them; None on a device that does not see it.
        rows: the name there of the file with dense rows, see `range_checkpoints`.
        checkpoint_after_s: see `DeviceSettings`.
    """

    work: Work
    of_samples: bool
    loss_parameters: tuple[str, ...]
    tensors: Mapping[tuple[str, str], TensorBuffer]  # by blob and name
    forms: Sequence[Sequence[Mapping[str, TensorForm]]]
    checkpoints: Path | None
    rows: str
    checkpoint_after_s: float | None

    @property
    def key(self) -> tuple[str, int]:
        """Which job, and which attempt at it."""
        return self.work.job_id, self.work.attempt


class SentTensors:
    """The tensors of a job that were sent to this device; stands in for `BlobTensors`."""

    def __init__(self, job: RangeJob, *, device: torch.device) -> None:
        self._tensors = job.tensors
        self._forms = job.forms
        self._device = device
        self._block_of: dict[Position, Any] = {}
        self._current: tuple[Any, ShardBlock] | None = None
        self._num_groups = 0

    def receive(self, blocks: Sequence[tuple[Sequence[Position], Any]]) -> None:
        """Know of shards: which lie in which block, a reference to which is given."""
        for positions, block in blocks:
            self._block_of.update(dict.fromkeys(positions, block))

    def tensor(self, ref: TensorRef) -> Tensor:
        """Return one tensor on the device, for itself."""
        return self._tensors[ref.blob, ref.tensor].tensor(copy=True).to(self._device)

    def shared(self, ref: TensorRef) -> Tensor:
        """Return one tensor on the host, in memory that is not its own: to be copied at once."""
        return self._tensors[ref.blob, ref.tensor].tensor(copy=False)

    def shards(self, refs: Sequence[ShardRef]) -> SentShards:
        """Return a group's shards; asked for once a group, in order."""
        group = self._num_groups
        self._num_groups += 1
        assert len(self._forms[group]) == len(refs)
        return SentShards(self, group)

    def num_shards(self, group: int) -> int:
        """Return how many shards a group has in the whole job."""
        return len(self._forms[group])

    def shard(self, position: Position) -> dict[str, Tensor]:
        """Return a shard that was sent, in memory of its own, for a model may write to its inputs.

        Of another one it returns what is known of it, as `meta` tensors.
        """
        reference = self._block_of.get(position)
        if reference is None:
            return {
                name: torch.empty(form.shape, dtype=form.dtype, device="meta")
                for name, form in self._forms[position.group][position.shard].items()
            }
        if self._current is None or self._current[0] != reference:
            self._current = None
            self._current = (reference, ray.get(reference))
        shard: dict[str, Tensor] = as_tensors(self._current[1][position])
        return shard


class SentShards(Sequence[Shard]):
    """The shards of one group."""

    def __init__(self, sent: SentTensors, group: int) -> None:
        self._sent = sent
        self._group = group

    def __len__(self) -> int:
        return self._sent.num_shards(self._group)

    @overload
    def __getitem__(self, index: int) -> Shard: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Shard]: ...
    def __getitem__(self, index: int | slice) -> Shard | Sequence[Shard]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._sent.shard(Position(self._group, index))
