"""A job that is open on one device: the model held ready, and the sums so far.

It is of a computation in two phases; `open_samples` has the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradbox.protocol import ForwardSpec, GradientSpec, MixedGradientSpec
from gradbox_engine import Checkpoints, EngineError, Observer
from gradbox_engine.mixed import held_mixed
from gradbox_engine.ranges import (
    EarlierOutputs,
    GraphsBetweenJobs,
    HeldJob,
    NamedSums,
    NormStatistics,
    Range,
    RangeCotangents,
    RangeGradient,
    RangeOutputs,
    added,
)
from gradbox_engine.requests import Returned
from gradbox_engine.set_loss import held_job
from gradbox_worker.cluster.actor.range_checkpoints import RangeCheckpoints
from gradbox_worker.cluster.exchange.array_buffers import TensorBuffer, as_buffers, num_bytes
from gradbox_worker.cluster.exchange.sent_tensors import RangeJob, SentTensors
from gradbox_worker.computations.engine_inputs import (
    built_readout,
    input_groups,
    mixed_inner,
    model_penalties,
)
from gradbox_worker.computations.job import call_options
from gradbox_worker.computations.sections import GRADS, section
from gradbox_worker.device.warm_device import WarmDevice
from gradbox_worker.files.placed_rows import WHOLE, PlacedRows, Placement
from gradbox_worker.files.rounded_gradients import Measured, RoundedGradients, widened_weights
from gradbox_worker.models.registry import Loaded
from gradbox_worker.work import Work


@dataclass(frozen=True)
class ReceivedJob:
    """A job as a device was sent it, with its model and what lies over that."""

    work: Work
    loaded: Loaded
    tensors: SentTensors
    device: torch.device
    readout: Any
    weights: Mapping[str, Tensor]
    weights_widened: int  # how many of the weights came in 16 bits

    @property
    def calls(self) -> dict[str, Any]:
        """How the model is called: the engine's `CallOptions`, but for penalties."""
        return call_options(self.work.spec, readout=self.readout, weights=self.weights)

    @classmethod
    def of(cls, job: RangeJob, device: WarmDevice) -> ReceivedJob:
        """Read it.

        Raises:
            GradboxError: as for the whole job.
        """
        work, spec, on_device = job.work, job.work.spec, device.registry.device
        device.kept.begin(work, loaded=device.registry.holds(work.model))
        loaded = device.registry.get(work.model, work.model_version)
        tensors = SentTensors(job, device=on_device)
        weights = {name: tensors.shared(ref) for name, ref in spec.weights.items()}
        widened = widened_weights(weights, loaded.module, transfer=spec.transfer)
        readout = built_readout(spec, tensors, device=on_device)
        return cls(work, loaded, tensors, on_device, readout, weights | widened, len(widened))


@dataclass(frozen=True)
class StoredSums:
    """Sums as they stand in the result file: by their names there, shapes and dtypes."""

    forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    rounded: Measured


class OpenJob:
    """A job that is open on this device, from one call to the next."""

    def __init__(self, device: WarmDevice, job: RangeJob, *, observer: Observer) -> None:
        """Make the model ready.

        Raises:
            GradboxError, EngineError: as for the whole job.
        """
        received = ReceivedJob.of(job, device)
        self.weights_widened = received.weights_widened
        self._shards = received.tensors
        self._sums: dict[int, NamedSums] = {}
        self._stored: Mapping[str, Tensor] = {}
        self._transfer = job.work.spec.transfer
        self._checkpoints = RangeCheckpoints(job, devices=received.loaded.devices)
        self._kept = device.kept
        self._open = ExitStack()
        try:
            self._open.enter_context(device.limit.held())
            self._job = self._open.enter_context(
                _held(received, job, observer, self._checkpoints.of, _graphs(received, device))
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Put the model back, in the thread that opened it."""
        # What the engine refuses on the way out a range has refused before, or the job has failed.
        with suppress(EngineError):
            self._open.close()
        self._kept.rest()

    def resumed(self, part: Range) -> int:
        """Return how often a range went on from a checkpoint."""
        return self._checkpoints.resumed(part.index)

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
        return replace(found, sums=part.index)

    def check(self, part: Range, norms: dict[str, NormStatistics]) -> int:
        """Check the range's first shard, and keep its graphs; see `HeldJob`."""
        return self._job.check(part, norms)

    def take_sums(self, index: int) -> dict[str, TensorBuffer]:
        """Give the sums of a range away."""
        buffers: dict[str, TensorBuffer] = as_buffers(self._sums.pop(index))
        return buffers

    def add(self, index: int, other: Mapping[str, TensorBuffer]) -> int:
        """Add the sums of other ranges to those of a range; returns their number of bytes."""
        mine = self._sums[index]
        right = {
            name: b.tensor(copy=False).to(mine[name].device)
            if name in mine
            else b.tensor(copy=True)
            for name, b in other.items()
        }
        self._sums[index] = added(mine, right)
        return num_bytes(dict(other))

    def stored_sums(self, index: int) -> StoredSums:
        """Round the sums of a range as the result has them, and return their forms."""
        rounding = RoundedGradients(self._transfer)
        self._stored = rounding.rounded(section(GRADS, self._sums[index]))
        forms = {name: (tuple(x.shape), x.dtype) for name, x in self._stored.items()}
        return StoredSums(forms, rounding.measured())

    def write_sums(self, index: int, placement: Placement) -> bool:
        """Write what `stored_sums` told of to the result file, and drop it.

        Returns:
            False if there is no such file here.

        Raises:
            StorageFull: the disk does not hold it.
        """
        try:
            file = PlacedRows(placement)
        except FileNotFoundError:
            return False
        with closing(file):
            for name, tensor in self._stored.items():
                file.write(name, WHOLE, tensor)
        self._sums.pop(index)
        self._stored = {}
        return True


def _graphs(received: ReceivedJob, device: WarmDevice) -> GraphsBetweenJobs:
    """Return the graphs that wait on the device, by ranges of this job's shards."""
    kept, work = device.kept, received.work
    return GraphsBetweenJobs(
        of=lambda part: kept.of(work, shards=(part.start, part.stop)),
        keep=lambda part, graphs: kept.keep(work, graphs, shards=(part.start, part.stop)),
        older=kept,
        records=lambda: kept.records,
    )


def _held(
    received: ReceivedJob,
    job: RangeJob,
    observer: Observer,
    checkpoints: Callable[[Range], Checkpoints],
    graphs: GraphsBetweenJobs,
) -> AbstractContextManager[HeldJob]:
    """Return the engine's side of a job in two phases."""
    spec, tensors = received.work.spec, received.tensors
    assert isinstance(spec, GradientSpec | ForwardSpec | MixedGradientSpec)
    groups = input_groups(spec, received.loaded.methods, tensors)
    called: dict[str, Any] = {"observer": observer, **received.calls}
    if isinstance(spec, MixedGradientSpec):
        inner, leaves = mixed_inner(spec, tensors, device=received.device)
        return held_mixed(
            received.loaded.module,
            groups[0],
            inner,
            leaves,
            z=spec.z,
            checkpoints=checkpoints,
            **called,
        )
    if isinstance(spec, ForwardSpec):
        module = received.loaded.module
        returns: tuple[Returned, ...] = ("buffers",)
        return held_job(
            module,
            groups,
            wrt=spec.wrt,
            retain=spec.retain,
            returns=returns,
            checkpoints=checkpoints,
            graphs=graphs,
            for_a_later_job=True,
            **called,
        )
    return held_job(
        received.loaded.module,
        groups,
        wrt=spec.wrt,
        loss_parameters=job.loss_parameters,
        retain=spec.retain,
        returns=tuple(spec.returns),
        penalties=model_penalties(spec, tensors, device=received.device),
        checkpoints=checkpoints,
        graphs=graphs,
        **called,
    )
