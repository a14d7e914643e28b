"""A wide job on one device: the model held ready, the shards that were sent, the sums so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, overload

import ray
import torch
from torch import Tensor

from gradbox.protocol import ForwardSpec, GradientSpec, ShardRef, TensorRef
from gradbox.protocol.spec import JOB_SPEC
from gradbox_engine import Observer
from gradbox_engine.model.shard_feed import Position
from gradbox_engine.ranges import (
    EarlierOutputs,
    HeldJob,
    NamedSums,
    NormStatistics,
    Range,
    RangeCotangents,
    RangeGradient,
    RangeOutputs,
    added,
    held_job,
)
from gradbox_engine.requests import Shard
from gradbox_worker.cluster.array_buffers import TensorBuffer, as_buffers, as_tensors, num_bytes
from gradbox_worker.computations.engine_inputs import (
    build_function,
    differentiated,
    input_groups,
    model_penalties,
)
from gradbox_worker.device.warm_device import WarmDevice
from gradbox_worker.files.blob_tensors import TensorForm
from gradbox_worker.files.rounded_gradients import widened_weights

ShardBlock = dict[Position, dict[str, TensorBuffer]]
"""Shards that travel together."""


@dataclass(frozen=True, kw_only=True)
class RangeJob:
    """What every device of a wide job is told.

    Attributes:
        spec: as JSON.
        loss_parameters: names that `wrt` may match besides the model's.
        tensors: what the spec's weights, readout and penalties name.
        forms: by group, what is known of every shard: its arguments' dtypes and shapes.
    """

    job_id: str
    attempt: int
    model: str
    model_version: str
    spec: str
    loss_parameters: tuple[str, ...]
    tensors: Mapping[tuple[str, str], TensorBuffer]  # by blob and name
    forms: Sequence[Sequence[Mapping[str, TensorForm]]]


class OpenJob:
    """A job that is open on this device, from one call to the next."""

    def __init__(self, device: WarmDevice, job: RangeJob, *, observer: Observer) -> None:
        """Make the model ready.

        Raises:
            GradboxError, EngineError: as for the whole job.
        """
        spec = JOB_SPEC.validate_json(job.spec)
        assert isinstance(spec, GradientSpec | ForwardSpec)
        loaded = device.registry.get(job.model, job.model_version)
        on_device = device.registry.device
        tensors = SentTensors(job, device=on_device)
        self._sums: dict[int, NamedSums] = {}
        self._shards = tensors
        weights = {name: tensors.tensor(ref) for name, ref in spec.weights.items()}
        widened = widened_weights(weights, loaded.module, transfer=spec.transfer)
        self.weights_widened = len(widened)
        readout = None
        if spec.readout is not None:
            readout = build_function(spec.readout, tensors, device=on_device).function
        gradient = isinstance(spec, GradientSpec)
        penalties = (
            model_penalties(spec, tensors, device=on_device)
            if isinstance(spec, GradientSpec)
            else []
        )
        self._open = ExitStack()
        try:
            self._open.enter_context(device.limit.held())
            self._job: HeldJob = self._open.enter_context(
                held_job(
                    loaded.module,
                    input_groups(spec, loaded.methods, tensors),
                    wrt=differentiated(spec) if isinstance(spec, GradientSpec) else spec.wrt,
                    loss_parameters=job.loss_parameters,
                    retain=spec.retain if gradient else 0,
                    returns=tuple(spec.returns) if gradient else ("buffers",),
                    observer=observer,
                    seed=spec.seed,
                    mode=spec.mode,
                    precision=spec.precision,
                    output=spec.output,
                    readout=readout,
                    weights=weights | widened,
                    penalties=penalties,
                    streams=spec.streams,
                )
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Put the model back, in the thread that opened it."""
        self._open.close()

    def forward(self, part: Range, blocks: Sequence[Any]) -> RangeOutputs:
        """Run the first pass of a range whose shards lie in these blocks; see `HeldJob`."""
        self._shards.receive(blocks)
        return self._job.forward(part)

    def resume(self, part: Range, earlier: EarlierOutputs, blocks: Sequence[Any]) -> None:
        """Hold a range whose outputs an earlier job returned; see `HeldJob`."""
        self._shards.receive(blocks)
        self._job.resume(part, earlier)

    def replay(self, part: Range, cotangents: RangeCotangents) -> RangeGradient:
        """Replay a range; its sums stay here, and the answer has the range's index for them."""
        found = self._job.replay(part, cotangents)
        assert isinstance(found.sums, dict)
        self._sums[part.index] = found.sums
        return RangeGradient(**{**vars(found), "sums": part.index})

    def check(self, part: Range, norms: Mapping[str, NormStatistics]) -> None:
        """Check the range's first shard; see `HeldJob`."""
        self._job.check(part, norms)

    def take_sums(self, index: int) -> dict[str, TensorBuffer]:
        """Give the sums of a range away."""
        buffers: dict[str, TensorBuffer] = as_buffers(self._sums.pop(index))
        return buffers

    def add(self, index: int, other: Mapping[str, TensorBuffer]) -> int:
        """Add the sums of other ranges to those of a range; returns their number of bytes."""
        mine = self._sums[index]
        device = next(iter(mine.values())).device if mine else torch.device("cpu")
        right = {name: b.tensor(copy=not mine or name not in mine) for name, b in other.items()}
        self._sums[index] = added(mine, {name: t.to(device) for name, t in right.items()})
        return num_bytes(dict(other))


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
        """Return a shard that was sent, and of another one what is known of it."""
        reference = self._block_of.get(position)
        if reference is None:
            return {
                name: torch.empty(form.shape, dtype=form.dtype, device="meta")
                for name, form in self._forms[position.group][position.shard].items()
            }
        if self._current is None or self._current[0] != reference:
            self._current = None
            self._current = (reference, ray.get(reference))
        shard: dict[str, Tensor] = as_tensors(self._current[1][position], copy=False)
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
