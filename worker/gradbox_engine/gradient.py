"""`set_gradient`: the three phases in a row, on a model that comes out as it went in."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradbox_engine.accumulation import GradientSums
from gradbox_engine.assembly import Assembly
from gradbox_engine.buffers import Buffers
from gradbox_engine.calls import ModelCalls
from gradbox_engine.comparison import ReplayComparison
from gradbox_engine.feed import Feed, Position
from gradbox_engine.job import (
    Group,
    Mode,
    Objective,
    Observer,
    Phase,
    Precision,
    Returned,
    SetGradient,
    Silent,
    model_device,
)
from gradbox_engine.objective import Differentiated, differentiate
from gradbox_engine.outputs import Outputs
from gradbox_engine.overlay import lay_over, widen
from gradbox_engine.phases import FirstPass, Prepared, Replayed, forward, replay
from gradbox_engine.precision import accumulation_dtype, arithmetic
from gradbox_engine.preservation import preserved
from gradbox_engine.retention import Retain, graph_budget
from gradbox_engine.selection import Selection, select

GRADS_ALONE: tuple[Returned, ...] = ("grads",)

FP16_LARGEST = 2.0**8
FP16_STEP = 2.0**-6
FP16_SMALLEST_SCALE = 2.0**-24


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
    retain: Retain = 0,
    returns: Collection[Returned] = GRADS_ALONE,
    observer: Observer | None = None,
) -> SetGradient:
    """Return dL/dθ for L = g(Z, extras), one shard's graph in memory at a time.

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
        retain: memory in bytes for graphs kept from the first pass, or "auto": what is free.
        returns: what to give back beside the gradients.
        observer: told before each shard; may raise to stop the job.

    Raises:
        EngineError: see `errors`; each says what was expected, what came, and what to do.
        torch.OutOfMemoryError: one shard's graph does not fit.
    """
    observer = observer or Silent()
    selection = select(model, wrt, others=objective.parameters)
    with _ready(model, selection, mode=mode, precision=precision, weights=weights or {}) as device:
        buffers = Buffers(model)
        prepared = Prepared(
            calls=ModelCalls(
                model,
                groups,
                seed=seed,
                precision=precision,
                device=device,
                output=output,
                readout=readout,
                input_patterns=selection.input_patterns,
            ),
            feed=Feed(groups, device, widened=precision == "fp64"),
            buffers=buffers,
            parameter_storages=frozenset(
                parameter.untyped_storage().data_ptr() for parameter in model.parameters()
            ),
        )
        run = _Run(prepared, GradientSums(selection.parameters), observer, precision)
        first = run.first_pass(retain, device)
        loss = run.cotangents(objective, first, seed=seed, device=device)
        replayed = run.replay(first, loss)
        return run.result(first, loss, replayed, returns)


class _Run:
    """One job on its way through the phases, and how long each took."""

    def __init__(
        self, prepared: Prepared, sums: GradientSums, observer: Observer, precision: Precision
    ) -> None:
        self._prepared = prepared
        self._groups = prepared.calls.groups
        self._sums = sums
        self._observer = observer
        self._precision = precision
        self._seconds: dict[Phase, float] = {}

    def first_pass(self, retain: Retain, device: torch.device) -> FirstPass:
        positions = [
            Position(group, shard)
            for group, members in enumerate(self._groups)
            for shard in range(len(members.shards))
        ]
        with self._timed("forward"):
            return forward(
                self._prepared,
                positions,
                before=self._prepared.buffers.first,
                budget=graph_budget(retain, device),
                observer=self._observer,
            )

    def cotangents(
        self, objective: Objective, first: FirstPass, *, seed: int, device: torch.device
    ) -> Differentiated:
        with self._timed("cotangents"):
            self._observer.step("cotangents", 0, 1)
            self._assembly = Assembly(
                self._groups, {record.position: record.outputs for record in first.records}
            )
            for record in first.records:  # views of Z, which is thus held once
                record.outputs = self._assembly.part(record.position, self._assembly.groups)
            loss = differentiate(
                objective,
                self._assembly.groups,
                self._groups,
                device=device,
                seed=seed,
                widened=self._precision == "fp64",
            )
            self._observer.step("cotangents", 1, 1)
            return loss

    def replay(self, first: FirstPass, loss: Differentiated) -> Replayed:
        """Replay; in fp16 again with a smaller scale for as long as a gradient overflows."""
        positions = [record.position for record in first.records]
        cotangents = self._flowing(positions, loss)
        self._sums.scale = _first_scale(cotangents) if self._precision == "fp16" else 1.0
        with self._timed("replay"):
            while True:
                replayed = replay(
                    self._prepared,
                    first.records,
                    cotangents,
                    self._sums,
                    comparison=ReplayComparison(self._precision),
                    observer=self._observer,
                )
                small = self._precision != "fp16" or self._sums.scale < FP16_SMALLEST_SCALE
                if small or self._sums.finite():
                    return replayed
                self._sums.clear()
                self._sums.scale *= FP16_STEP

    def result(
        self,
        first: FirstPass,
        loss: Differentiated,
        replayed: Replayed,
        returns: Collection[Returned],
    ) -> SetGradient:
        grads = self._sums.named()
        unreached = list(self._sums.unreached())
        for name, gradient in loss.parameters.items():
            if gradient is None:
                unreached.append(name)
            else:
                grads[name] = gradient.to(accumulation_dtype(gradient.dtype))
        buffers = self._prepared.buffers
        return SetGradient(
            loss=loss.loss,
            grads=grads,
            unreached=tuple(unreached),
            shards={group.name: len(group.shards) for group in self._groups},
            retained=replayed.num_retained,
            replayed=replayed.num_replayed,
            replay_difference=replayed.difference,
            seconds=self._seconds,
            buffers=buffers.named(first.after) if "buffers" in returns else None,
            outputs=loss.seen if "outputs" in returns else None,
            cotangents=loss.seen_cotangents if "cotangents" in returns else None,
        )

    def _flowing(
        self, positions: Sequence[Position], loss: Differentiated
    ) -> dict[Position, Outputs]:
        """Return the cotangents of the shards that need a backward pass.

        A shard whose cotangent is zero needs none, but for one in each group that the loss depends
        on: by it the parameters that the loss reaches are told from those that it does not.
        """
        parts = {p: self._assembly.part(p, loss.cotangents) for p in positions}
        parts = {p: part for p, part in parts.items() if part}
        nonzero = _nonzero(parts)
        for group in {position.group for position in parts}:
            members = [position for position in parts if position.group == group]
            if not nonzero.intersection(members):
                nonzero.add(members[-1])
        return {position: part for position, part in parts.items() if position in nonzero}

    @contextmanager
    def _timed(self, phase: Phase) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[phase] = time.perf_counter() - start


@contextmanager
def _ready(
    model: nn.Module,
    selection: Selection,
    *,
    mode: Mode,
    precision: Precision,
    weights: Mapping[str, Tensor],
) -> Iterator[torch.device]:
    """Set flags, numbers and arithmetic for one job, and put all of it back after it."""
    with preserved(model), arithmetic(precision):
        lay_over(model, weights)
        if precision == "fp64":
            widen(model)
        model.train(mode == "train")
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
        for parameter in selection.parameters.values():
            parameter.requires_grad_()
        yield model_device(model)


def _nonzero(parts: Mapping[Position, Outputs]) -> set[Position]:
    """Return the shards whose cotangent is not zero everywhere; waits for the device once."""
    if not parts:
        return set()
    flags = [torch.stack([(c != 0).any() for c in part.values()]).any() for part in parts.values()]
    return {p for p, flag in zip(parts, torch.stack(flags).tolist(), strict=True) if flag}


def _first_scale(cotangents: Mapping[Position, Outputs]) -> float:
    """Return the power of two that lifts the largest cotangent to about FP16_LARGEST."""
    largest = [c.abs().amax() for part in cotangents.values() for c in part.values() if c.numel()]
    top = float(torch.stack(largest).amax()) if largest else 0.0
    if not 0 < top < torch.inf:
        return 1.0
    return 2.0 ** round(torch.log2(torch.tensor(FP16_LARGEST / top)).item())
