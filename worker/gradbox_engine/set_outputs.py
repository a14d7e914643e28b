"""`set_outputs`: the first phase alone, for a loss that runs elsewhere.

    Z = cat(z₁ … zₙ),   zᵢ = f(xᵢ; θ)

under the random streams and buffers that a gradient of the same shards would see, and with all
parameters requiring grad: kernels that are only taken where nothing does would round otherwise than
the replay will. Cost: n forwards; memory beyond the model: Z twice and one shard's graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradbox_engine.assembly import Assembly, permutation
from gradbox_engine.feed import Position
from gradbox_engine.job import Group, Mode, Observer, Phase, Precision, Silent, Z
from gradbox_engine.outputs import Outputs, as_z
from gradbox_engine.phases import forward
from gradbox_engine.preparation import Streams, Terms, prepared
from gradbox_engine.retention import GraphBudget
from gradbox_engine.selection import select


@dataclass(frozen=True)
class SetOutputs:
    """Z of each group, in the order that the group asks for and in the model's own dtype.

    `rows` has each shard's number of rows in Z, before that order; None where z has no dimension.
    `buffers` are the model's buffers advanced once per shard.
    """

    outputs: dict[str, Z]
    rows: dict[str, tuple[int | None, ...]]
    buffers: dict[str, Tensor]
    seconds: dict[Phase, float]


def set_outputs(
    model: nn.Module,
    groups: Sequence[Group],
    *,
    seed: int = 0,
    mode: Mode = "eval",
    precision: Precision = "fp32",
    output: str | int | None = None,
    readout: Callable[[Any, dict[str, Any]], Any] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    streams: Streams = "shard",
    observer: Observer | None = None,
) -> SetOutputs:
    """Return the outputs of all shards; the arguments are those of `set_gradient`.

    Raises:
        EngineError: see `errors`; each says what was expected, what came, and what to do.
        torch.OutOfMemoryError: one shard does not fit.
    """
    terms = Terms(
        seed=seed,
        mode=mode,
        precision=precision,
        output=output,
        readout=readout,
        weights=weights or {},
        streams=streams,
    )
    began = time.perf_counter()
    with prepared(model, groups, select(model, None), terms) as ready:
        first = forward(
            ready,
            all_positions(groups),
            before=ready.buffers.first,
            budget=GraphBudget(0),
            observer=observer or Silent(),
        )
        outputs = {record.position: record.outputs for record in first.records}
        assembly = Assembly(groups, outputs)
        return SetOutputs(
            outputs={
                group.name: as_z(_ordered(assembly.groups[group.name], group)) for group in groups
            },
            rows={
                group.name: tuple(
                    _num_rows(outputs[Position(index, shard)]) for shard in range(len(group.shards))
                )
                for index, group in enumerate(groups)
            },
            buffers=ready.buffers.named(first.after),
            seconds={"forward": time.perf_counter() - began},
        )


def all_positions(groups: Sequence[Group]) -> list[Position]:
    """Return where every shard is, in the order in which they pass through the model."""
    return [
        Position(index, shard)
        for index, group in enumerate(groups)
        for shard in range(len(group.shards))
    ]


def _num_rows(outputs: Outputs) -> int | None:
    z = next(iter(outputs.values()))
    return None if z.ndim == 0 else z.shape[0]


def _ordered(whole: Outputs, group: Group) -> Outputs:
    if group.order is None:
        return whole
    num_rows = len(next(iter(whole.values())))
    order_N = permutation(group.order, num_rows, group=group.name)
    return {name: z.index_select(0, order_N.to(z.device)) for name, z in whole.items()}
