"""A first pass whose graphs wait for their cotangents, beyond the call that made them.

Between the two halves the model is as it was registered: requires_grad, data and buffers have been
put back. That changes nothing in the graphs. What they saved are tensors of their own, aliases of
the parameters' data as it then was, and copies of buffers; and the nodes that accumulate gradients
into the parameters do so again once the second half has prepared the model in the same way.

One limit: such a node, which all graphs of a parameter share, fixes its dtype. While a pass in
float64 is kept, none of the same model in another precision may begin, nor the other way round.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.tensor_equality import storages_of
from gradbox_engine.replay.retention import HELD_FACTOR
from gradbox_engine.replay.shard_record import ShardRecord


@dataclass(eq=False)
class KeptPass:
    """The records of a first pass in order, with those of their graphs that are still kept.

    `parameters` and `inputs` are what the graphs differentiate: names of parameters, and arguments
    by group. `rows` are as in `SetOutputs`. `overlay_bytes` is the data of parameters that only
    the graphs hold any more, because it was laid over the registered one.
    """

    records: list[ShardRecord]
    parameters: frozenset[str]
    inputs: Mapping[str, Sequence[str]]
    rows: Mapping[str, Sequence[int | None]]
    overlay_bytes: int

    @property
    def num_kept(self) -> int:
        """How many shards' graphs are kept."""
        return sum(record.graph is not None for record in self.records)

    @property
    def num_bytes(self) -> float:
        """What they take, about."""
        saved_bytes = sum(record.num_bytes for record in self.records if record.graph)
        return HELD_FACTOR * saved_bytes + (self.overlay_bytes if self.num_kept else 0)

    @property
    def newest_bytes(self) -> int:
        """Saved tensors of the last one."""
        return next((record.num_bytes for record in reversed(self.records) if record.graph), 0)

    def free_one(self) -> None:
        """Free the first graph that is kept."""
        next(record for record in self.records if record.graph).free_graph()

    def free(self) -> None:
        """Free all graphs."""
        for record in self.records:
            record.free_graph()

    def usable_for(
        self,
        positions: Container[Position],
        *,
        parameters: frozenset[str],
        inputs: Mapping[str, Sequence[str]],
    ) -> list[ShardRecord]:
        """Return the records, having freed graphs at positions that differentiate anything else.

        A graph that differentiates more would do, but not to the last bit: kernels may depend on
        what is wanted.

        Args:
            inputs: arguments by group, in the order of the groups.
        """
        wanted = list(inputs.items())
        for record in self.records:
            if record.position not in positions:
                continue
            group, names = wanted[record.position.group]
            if parameters != self.parameters or set(names) != set(self.inputs[group]):
                record.free_graph()
        return self.records


def places_of(model: nn.Module) -> frozenset[int]:
    """Return the addresses of the storages that the parameters' data lies in."""
    return frozenset(storages_of(model.parameters()))


def bytes_beside(registered: Collection[int], model: nn.Module) -> int:
    """Return how many bytes of the parameters' data lie in other storages than these."""
    storages = storages_of(model.parameters())
    return sum(s.nbytes() for address, s in storages.items() if address not in registered)
