"""One call of the model on one shard, the same in the first pass and in the replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gradbox_engine.errors import BadInputs
from gradbox_engine.model.calling.blame import blaming
from gradbox_engine.model.calling.outputs import Outputs, as_outputs, choose
from gradbox_engine.model.calling.penalties import Tap, Taps
from gradbox_engine.model.calling.recompute import Recomputation, Rerun
from gradbox_engine.model.calling.sample_rng import SampleStreams
from gradbox_engine.model.calling.shard_feed import Position, call_arguments, shard_name
from gradbox_engine.model.calling.shard_rng import (
    begin_stream,
    generator_states,
    generators_at,
)
from gradbox_engine.model.precision import autocast
from gradbox_engine.requests import CallOptions, Group

NOTHING = nullcontext()


@dataclass(slots=True)
class ShardGraph:
    """What one call on a shard returned, with its graph.

    `inputs` are the arguments whose gradients are wanted, as leaves of that graph; `taps` the
    activations under penalties, each with its place in the graph. Without `intact` the model has
    overwritten one of those, and the graph is of no use.
    """

    outputs: Outputs
    inputs: dict[str, Tensor]
    taps: list[tuple[Tap, GradientEdge | None]]
    penalties: list[Tensor]  # the penalties' values, where they were wanted
    intact: bool
    recomputed: bool


class ModelCalls:
    """Calls a model's entry points under each shard's own random stream and one precision.

    The global generators stay where a call leaves them; `prepared` puts them back.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Group],
        options: CallOptions,
        *,
        device: torch.device,
        differentiated: Mapping[str, Sequence[str]],
    ) -> None:
        """Find the entry points and the penalties' submodules.

        Args:
            differentiated: by group, the arguments whose gradients are wanted.

        Raises:
            BadInputs: a group names no method of the model.
            BadPenalty: a penalty names no submodule.
            SampleStreamRefused: the model cannot draw by sample.
        """
        self.groups = groups
        self._model = model
        self._options = options
        self._entries = [entry_point(model, g.method, f"group {g.name!r}") for g in groups]
        self._device = device
        self._differentiated = differentiated
        self._autocast = autocast(options.precision, device)  # entered in each call
        self._taps = Taps(model, options.penalties)
        by_sample = options.streams == "sample"
        self._by_sample = SampleStreams(model, groups, seed=options.seed) if by_sample else None
        self.recomputation = Recomputation(model, groups, options.recompute, options.precision)

    def __call__(
        self,
        position: Position,
        arguments: dict[str, Any],
        *,
        with_penalties: bool = False,
        recompute: bool | None = None,
        observed: AbstractContextManager[object] = NOTHING,
    ) -> ShardGraph:
        """Put a shard through the model and return z with its graph.

        Args:
            with_penalties: whether to evaluate the penalties here too; in the backward pass they
                are in any case.
            recompute: whether its blocks are computed again in the backward pass; None: where the
                job's option says so.
            observed: a function mode, which sees what model and readout call.

        Raises:
            ModelCallFailed: the model or the readout raised; the message says on which shard.
            BadOutput: there is no floating-point tensor where z was looked for.
            torch.OutOfMemoryError: the shard does not fit.
        """
        leaves = self._leaves(position, arguments)
        arguments = {**arguments, **leaves}
        by_place, by_name = call_arguments(arguments)
        entry, readout = self._entries[position.group], self._options.readout
        wanted = self.recomputation.wanted(position, arguments)
        recomputed = wanted if recompute is None else recompute
        self.begin(position)
        with (
            blaming("the model", self.where(position), model=self._model, arguments=arguments),
            self._drawing(position),
            self._autocast,
            self._taps.hooked(with_values=with_penalties) as tapped,
            self._blocks_cut(position) if recomputed else NOTHING,
        ):
            with torch.enable_grad(), observed:  # the model may leave it switched off
                value = choose(entry(*by_place, **by_name), self._options.output)
            if readout is not None:
                given = {"output": value, "inputs": arguments}
                with (
                    blaming("the readout", self.where(position), arguments=given),
                    torch.enable_grad(),
                    observed,
                ):
                    value = readout(self._brought(value), arguments)
        source = "model" if readout is None else "readout"
        outputs = as_outputs(value, source=source)
        return ShardGraph(
            outputs={name: self._brought(z) for name, z in outputs.items()},
            inputs=leaves,
            taps=tapped.taps,
            penalties=tapped.values,
            intact=self._taps.all_intact(tapped),
            recomputed=recomputed,
        )

    def begin(self, position: Position) -> None:
        """Put the global generators where a shard's stream begins."""
        begin_stream(self._options.seed, *self._stream(position))

    def backward(self) -> AbstractContextManager[None]:
        """Return the context in which a shard's backward pass runs."""
        return nullcontext() if self._by_sample is None else self._by_sample.backward()

    def _stream(self, position: Position) -> tuple[int, int]:
        streams = self.groups[position.group].streams
        return position if streams is None else streams[position.shard]

    def _drawing(self, position: Position) -> AbstractContextManager[None]:
        if self._by_sample is None:
            return nullcontext()
        return self._by_sample.drawing(position, self._device)

    def _blocks_cut(self, position: Position) -> AbstractContextManager[None]:
        rerun = _same_numbers if self._by_sample is None else self._by_sample.rerun
        return self.recomputation.blocks_cut(position, self.where(position), rerun)

    def where(self, position: Position) -> str:
        """Name a shard in a message."""
        return shard_name(self.groups, position)

    def _brought(self, value: Any) -> Any:
        """Return a tensor where z is: a model on several devices may return it on any of them."""
        return value.to(self._device) if isinstance(value, Tensor) else value

    def _leaves(self, position: Position, arguments: dict[str, Any]) -> dict[str, Tensor]:
        names = self._differentiated[self.groups[position.group].name]
        return {name: arguments[name].requires_grad_() for name in names}


def _same_numbers() -> Rerun:
    return partial(generators_at, generator_states())


def entry_point(model: nn.Module, method: str, where: str) -> Callable[..., Any]:
    """Return what is called: a method of the model by name, the model itself for `forward`.

    Raises:
        BadInputs: there is none of that name.
    """
    if method == "forward":
        return model
    found = getattr(model, method, None)
    if not callable(found):
        raise BadInputs(f"{where}: expected a method of {type(model).__name__}, got {method!r}")
    called: Callable[..., Any] = found
    return called
