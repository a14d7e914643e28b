"""What a device keeps of a range between its first pass and its replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.precision import accumulation_dtype
from gradbox_engine.model.prepared import Prepared
from gradbox_engine.ranges.protocol import GradientForm, RangeCotangents, RangeGradient
from gradbox_engine.replay.checkpoint import JobCheckpoint
from gradbox_engine.replay.fp16_scaling import scaled_replay
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.kept_graphs import KeptPass
from gradbox_engine.replay.replay import ReplayProgress
from gradbox_engine.replay.shard_record import ShardRecord, free_graphs
from gradbox_engine.replay.z import NumRows, ShardRows
from gradbox_engine.requests import Observer


@dataclass
class RangeOnDevice:
    """A range that was put through the model.

    `sums` and `second` are the sums and the progress of a replay that was interrupted. `kept` is
    there if an earlier job put the range through, and left its graphs.
    """

    ready: Prepared
    parameters: Mapping[str, Tensor]  # those that are differentiated
    records: list[ShardRecord]
    num_rows: NumRows
    checkpoint: JobCheckpoint
    sums: GradientSums
    second: Checkpoint | None
    kept: KeptPass | None = None

    def free_unusable(self, cotangents: RangeCotangents) -> None:
        """Free graphs of an earlier job that differentiate other things than this one."""
        if self.kept is None:
            return
        groups = self.ready.calls.groups
        positions = {
            record.position
            for record in self.records
            if cotangents.cotangents.get(groups[record.position.group].name)
        }
        parameters = frozenset(self.parameters)
        self.kept.usable_for(positions, parameters=parameters, inputs=self.ready.inputs)

    def replay(self, cotangents: RangeCotangents, observer: Observer) -> ReplayProgress:
        """Carry the cotangents back, into `sums`; raises as `scaled_replay` does."""
        ready, given = self.ready, cotangents.cotangents
        whole = {group: to_device(named, ready.device) for group, named in given.items()}
        positions = [record.position for record in self.records]
        parts = ShardRows(ready.calls.groups, self.num_rows, positions=positions).parts(whole)
        needed = {position: parts[position] for position in cotangents.needed}
        free_graphs(self.records, parts.keys() - needed.keys())
        return scaled_replay(
            ready,
            self.records,
            needed,
            self.sums,
            observer=observer,
            resumed=self.second,
            after_shard=partial(self.checkpoint.after_second_call, self.records),
        )

    def penalties(self) -> Tensor:
        """Return the values of the penalties, shard by shard, in float64 on the host."""
        values = [value.double() for record in self.records for value in record.penalties]
        return (torch.stack(values) if values else torch.zeros(0).double()).cpu()

    def gradient(self, replayed: ReplayProgress, *, seconds: float) -> RangeGradient:
        """Return the answer to the coordinator, once the range was replayed."""
        return RangeGradient(
            sums=self.sums.reached(),
            parameters={
                name: GradientForm(tuple(p.shape), accumulation_dtype(p.dtype))
                for name, p in self.parameters.items()
            },
            inputs={group: tuple(names) for group, names in self.ready.inputs.items()},
            input_grads={
                position: {n: None if g is None else g.cpu() for n, g in named.items()}
                for position, named in replayed.input_grads.items()
            },
            retained=replayed.num_retained,
            replayed=replayed.num_replayed,
            replay_difference=replayed.difference,
            seconds=seconds,
        )


def to_device(named: Mapping[str, Tensor], device: torch.device) -> Outputs:
    """Return tensors on a device."""
    return {name: tensor.to(device) for name, tensor in named.items()}


def on_host(named: Mapping[str, Tensor]) -> Outputs:
    """Return tensors in the host's memory."""
    return to_device(named, torch.device("cpu"))
