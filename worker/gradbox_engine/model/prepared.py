"""A model made ready for one job: flags, numbers, arithmetic, and the ways to call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradbox_engine.model.buffers import Buffers
from gradbox_engine.model.calls import ModelCalls
from gradbox_engine.model.input_gradients import matched_inputs
from gradbox_engine.model.penalties import Taps
from gradbox_engine.model.precision import arithmetic
from gradbox_engine.model.restore import preserved
from gradbox_engine.model.sample_rng import SampleStreams
from gradbox_engine.model.shard_feed import Feed
from gradbox_engine.model.shard_rng import generators_restored
from gradbox_engine.model.tables import gather_rows
from gradbox_engine.model.weights import lay_over, widen
from gradbox_engine.model.wrt import Selection
from gradbox_engine.replay.retention import known_bytes
from gradbox_engine.replay.shard_record import Prepared
from gradbox_engine.replay.ungraphed import Ungraphed
from gradbox_engine.requests import Group, Mode, Penalty, Precision, model_device

Streams = Literal["shard", "sample"]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How a job calls the model: what `set_gradient` was told, beside model, shards and loss."""

    seed: int = 0
    mode: Mode = "eval"
    precision: Precision = "fp32"
    output: str | int | None = None
    readout: Callable[[Any, dict[str, Any]], Any] | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    penalties: Sequence[Penalty] = ()
    streams: Streams = "shard"


@contextmanager
def prepared(
    model: nn.Module, groups: Sequence[Group], selection: Selection, terms: Terms
) -> Iterator[Prepared]:
    """Make a model ready, and put it back on the way out, whatever happened inside."""
    device = model_device(model)
    feed = Feed(groups, device, widened=terms.precision == "fp64")
    inputs = matched_inputs(groups, selection.input_patterns)
    with (
        torch.inference_mode(False),
        preserved(model) as state,
        generators_restored(),
        arithmetic(terms.precision),
    ):
        lay_over(model, terms.weights)
        if terms.precision == "fp64":
            widen(model)
        model.train(terms.mode == "train")
        storages = set()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
            storages.add(parameter.untyped_storage().data_ptr())
        for parameter in selection.parameters.values():
            parameter.requires_grad_()
        gather_rows(model, selection.parameters.values())
        by_sample = terms.streams == "sample"
        calls = ModelCalls(
            model,
            groups,
            seed=terms.seed,
            precision=terms.precision,
            device=device,
            output=terms.output,
            readout=terms.readout,
            differentiated=inputs,
            taps=Taps(model, terms.penalties),
            sample_streams=SampleStreams(model, groups, seed=terms.seed) if by_sample else None,
        )
        setting = (
            terms.mode,
            terms.precision,
            terms.output,
            terms.streams,
            frozenset(selection.parameters),
            tuple((name, *wanted) for name, wanted in inputs.items()),
            torch.get_num_threads(),
        )
        yield Prepared(
            calls,
            feed,
            Buffers(model),
            inputs,
            device,
            frozenset(storages),
            Ungraphed(model, setting),
            state,
            # Readouts and penalties are part of the graph, and another job's are others.
            None if terms.readout or terms.penalties else known_bytes(model, setting),
        )
