"""`set_gradient`: the three phases in a row, on a model that comes out as it went in."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradbox_engine.errors import BadInputs
from gradbox_engine.model.input_gradients import collect
from gradbox_engine.model.prepared import Streams, Terms, prepared
from gradbox_engine.model.shard_feed import Position, all_positions
from gradbox_engine.model.wrt import select
from gradbox_engine.replay.attempts import attempted
from gradbox_engine.replay.comparison import ReplayComparison
from gradbox_engine.replay.cotangents import Differentiated, differentiate
from gradbox_engine.replay.first_pass import FirstPass, forward
from gradbox_engine.replay.fp16_scaling import Parts, flowing, scaled
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.replay import Replayed, replay
from gradbox_engine.replay.retention import Retain, graph_budget
from gradbox_engine.replay.shard_record import Prepared, with_room
from gradbox_engine.replay.z import Assembly
from gradbox_engine.requests import (
    Group,
    Mode,
    Objective,
    Observer,
    Penalty,
    Phase,
    Precision,
    Returned,
    SetGradient,
    Silent,
)

GRADS_ALONE: tuple[Returned, ...] = ("grads",)


def set_gradient(
    model: nn.Module,
    groups: Sequence[Group],
    objective: Objective,
    *,
    seed: int = 0,
    mode: Mode = "eval",
    wrt: Sequence[str] | None = None,
    precision: Precision = "fp32",
    output: str | int | None = None,
    readout: Callable[[Any, dict[str, Any]], Any] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    penalties: Sequence[Penalty] = (),
    retain: Retain = 0,
    streams: Streams = "shard",
    returns: Collection[Returned] = GRADS_ALONE,
    observer: Observer | None = None,
) -> SetGradient:
    """Return dL/dθ for L = g(Z, extras) + Σ penalties, one shard's graph in memory at a time.

    Args:
        model: on one device; bit-identical afterwards, also after an error.
        groups: shards and the entry points they go through, in order.
        mode: what `model.train()` is told.
        wrt: patterns over parameter names, and "inputs.NAME"; None is every floating-point
            parameter, whatever its `requires_grad`.
        output: which part of the model's output is z, see `outputs`.
        readout: (output, inputs) → z, run on every shard after `output`; a tensor, or a dict of
            tensors.
        weights: part of a state dict, for this job alone.
        penalties: terms on intermediate activations, see `penalties`.
        retain: memory in bytes for graphs kept from the first pass, or "auto": what is free.
        streams: whether random numbers belong to shards, or to samples, see `sample_streams`.
        returns: what to give back beside the gradients.
        observer: told before each shard; may raise to stop the job.

    Raises:
        EngineError: see `errors`; each says what was expected, what came, and what to do.
        torch.OutOfMemoryError: one shard's graph does not fit.
    """
    selection = select(model, wrt, others=objective.parameters)
    both = sorted(selection.parameters.keys() & objective.parameters)
    if both:
        raise BadInputs(
            f"objective: expected names for its parameters that the model has none of, got {both}; "
            f"name them otherwise, or leave the model's out by wrt"
        )
    terms = Terms(
        seed=seed,
        mode=mode,
        precision=precision,
        output=output,
        readout=readout,
        weights=weights or {},
        penalties=penalties,
        streams=streams,
    )

    def attempt() -> SetGradient:
        with prepared(model, groups, selection, terms) as ready:
            run = _Run(ready, terms, GradientSums(selection.parameters), observer or Silent())
            first = run.first_pass(retain)
            loss = run.cotangents(objective, first)
            replayed = run.replay(first, loss)
            ready.ungraphed.confirm()
            return run.result(first, loss, replayed, returns)

    return attempted(model, attempt)


class _Run:
    """One job on its way through the phases, and how long each took."""

    def __init__(
        self, ready: Prepared, terms: Terms, sums: GradientSums, observer: Observer
    ) -> None:
        self._ready = ready
        self._groups = ready.calls.groups
        self._terms = terms
        self._sums = sums
        self._observer = observer
        self._seconds: dict[Phase, float] = {}

    def first_pass(self, retain: Retain) -> FirstPass:
        with self._timed("forward"):
            return forward(
                self._ready,
                all_positions(self._groups),
                before=self._ready.buffers.first,
                budget=graph_budget(
                    retain,
                    self._ready.device,
                    sums_bytes=self._sums.expected_bytes(),
                    known=self._ready.graph_bytes,
                ),
                observer=self._observer,
            )

    def cotangents(self, objective: Objective, first: FirstPass) -> Differentiated:
        with self._timed("cotangents"):
            self._observer.step("cotangents", 0, 1)
            loss = with_room(partial(self._differentiate, objective, first), first.records)
            self._observer.step("cotangents", 1, 1)
            return loss

    def _differentiate(self, objective: Objective, first: FirstPass) -> Differentiated:
        self._assembly = Assembly(
            self._groups, {record.position: record.outputs for record in first.records}
        )
        for record in first.records:  # views of Z, which is thus held once
            record.outputs = self._assembly.part(record.position, self._assembly.groups)
        return differentiate(
            objective,
            self._assembly.groups,
            self._groups,
            device=self._ready.device,
            seed=self._terms.seed,
            widened=self._terms.precision == "fp64",
            penalty=_total([value for record in first.records for value in record.penalties]),
        )

    def replay(self, first: FirstPass, loss: Differentiated) -> Replayed:
        # The last shard's graph is there: its turn comes first, for nothing else is held then.
        records = (*first.records[-1:], *first.records[:-1])
        cotangents = self._flowing([record.position for record in first.records], loss)

        def once() -> Replayed:
            return replay(
                self._ready,
                records,
                cotangents,
                self._sums,
                comparison=ReplayComparison(self._terms.precision),
                observer=self._observer,
            )

        with self._timed("replay"):
            return scaled(once, cotangents, self._sums, self._terms.precision)

    def result(
        self,
        first: FirstPass,
        loss: Differentiated,
        replayed: Replayed,
        returns: Collection[Returned],
    ) -> SetGradient:
        input_grads, unreached_inputs = collect(
            self._groups, self._ready.inputs, replayed.input_grads, device=self._ready.device
        )
        buffers = self._ready.buffers
        return SetGradient(
            loss=loss.loss,
            grads=self._sums.named() | loss.parameters,
            unreached=(*self._sums.unreached(), *unreached_inputs, *loss.unreached),
            shards={group.name: len(group.shards) for group in self._groups},
            retained=replayed.num_retained,
            replayed=replayed.num_replayed,
            replay_difference=replayed.difference,
            seconds=self._seconds,
            buffers=buffers.named(first.after) if "buffers" in returns else None,
            outputs=loss.seen if "outputs" in returns else None,
            cotangents=loss.seen_cotangents if "cotangents" in returns else None,
            input_grads=input_grads or None,
        )

    def _flowing(self, positions: Sequence[Position], loss: Differentiated) -> Parts:
        """Return the cotangents of the shards that need a backward pass; with penalties all do."""
        parts = Parts(positions, lambda p: self._assembly.part(p, loss.cotangents))
        return parts if self._ready.calls.has_penalties else flowing(parts)

    @contextmanager
    def _timed(self, phase: Phase) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._ready.device.type == "cuda":
            torch.cuda.synchronize(self._ready.device)
        self._seconds[phase] = time.perf_counter() - start


def _total(values: Sequence[Tensor]) -> float:
    """Return the sum of 0-dim tensors; waits for the device once."""
    return float(torch.stack([value.double() for value in values]).sum()) if values else 0.0
