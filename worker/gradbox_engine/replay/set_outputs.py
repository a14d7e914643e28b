"""`set_outputs`: the first phase alone, for a loss that runs elsewhere.

    Z = cat(z₁ … zₙ),   zᵢ = f(xᵢ; θ)

under the random streams and buffers that a gradient of the same shards would see, and with the same
parameters requiring grad: kernels that are only taken where nothing does would round otherwise than
the replay will. Graphs may be kept for the second half, `gradient_at_cotangents`.

Cost: n forwards; memory beyond the model: Z, one shard's graph, and the graphs that are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradbox_engine.model.outputs import Outputs, as_z
from gradbox_engine.model.prepared import Streams, Terms, prepared
from gradbox_engine.model.shard_feed import Position, all_positions
from gradbox_engine.model.wrt import select
from gradbox_engine.replay.attempts import attempted
from gradbox_engine.replay.first_pass import FirstPass, forward
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.kept_graphs import KeptPass
from gradbox_engine.replay.retention import NONE_OLDER, OlderGraphs, Retain, graph_budget
from gradbox_engine.replay.shard_record import Prepared
from gradbox_engine.replay.z import Assembly, permutation
from gradbox_engine.requests import Group, Mode, Observer, Phase, Precision, Silent, Z


@dataclass(frozen=True)
class SetOutputs:
    """Z of each group, in the order that the group asks for and in the model's own dtype.

    `rows` has each shard's number of rows in Z, before that order; None where z has no dimension.
    `buffers` are the model's buffers advanced once per shard. `kept` is there if graphs were to be.
    """

    outputs: dict[str, Z]
    rows: dict[str, tuple[int | None, ...]]
    buffers: dict[str, Tensor]
    seconds: dict[Phase, float]
    kept: KeptPass | None = None


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
    wrt: Sequence[str] | None = None,
    streams: Streams = "shard",
    retain: Retain = 0,
    older: OlderGraphs = NONE_OLDER,
    observer: Observer | None = None,
) -> SetOutputs:
    """Return the outputs of all shards; the arguments are those of `set_gradient`.

    Args:
        wrt: what the second half will be asked for.
        retain: memory in bytes for graphs that are kept for it, or "auto": what is free. These do
            not outlive `SetOutputs.kept`.
        older: what other calls kept, which `retain` has to do for, too.

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
    selection = select(model, wrt)

    def attempt() -> SetOutputs:
        began = time.perf_counter()
        registered = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        with prepared(model, groups, selection, terms) as ready:
            overlay_bytes = _bytes_beside(registered, model)
            budget = graph_budget(
                retain,
                ready.device,
                sums_bytes=GradientSums(selection.parameters).expected_bytes(),
                overlay_bytes=overlay_bytes,
                older=older,
            )
            first = forward(
                ready,
                all_positions(groups),
                before=ready.buffers.first,
                budget=budget,
                observer=observer or Silent(),
                outliving=True,
            )
            return _answer(ready, first, frozenset(selection.parameters), overlay_bytes, began)

    return attempted(model, attempt)


def _answer(
    ready: Prepared, first: FirstPass, parameters: frozenset[str], overlay_bytes: int, began: float
) -> SetOutputs:
    groups = ready.calls.groups
    outputs = {record.position: record.outputs for record in first.records}
    rows = {
        group.name: tuple(
            _num_rows(outputs[Position(index, shard)]) for shard in range(len(group.shards))
        )
        for index, group in enumerate(groups)
    }
    kept = KeptPass(first.records, parameters, ready.inputs, rows, overlay_bytes)
    assembly = Assembly(groups, outputs)
    return SetOutputs(
        outputs={
            group.name: as_z(_ordered(assembly.groups[group.name], group)) for group in groups
        },
        rows=rows,
        buffers=ready.buffers.named(first.after),
        seconds={"forward": time.perf_counter() - began},
        kept=kept if kept.num_kept else None,
    )


def _num_rows(outputs: Outputs) -> int | None:
    z = next(iter(outputs.values()))
    return None if z.ndim == 0 else z.shape[0]


def _ordered(whole: Outputs, group: Group) -> Outputs:
    if group.order is None:
        return whole
    num_rows = len(next(iter(whole.values())))
    order_N = permutation(group.order, num_rows, group=group.name)
    return {name: z.index_select(0, order_N.to(z.device)) for name, z in whole.items()}


def _bytes_beside(registered: Collection[int], model: nn.Module) -> int:
    """Return how many bytes of the parameters' data lie in other storages than these."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(s.nbytes() for address, s in storages.items() if address not in registered)
