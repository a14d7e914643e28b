"""One call of the model on one shard, the same in the first pass and in the replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gradbox_engine.errors import BadInputs
from gradbox_engine.model.blame import blaming
from gradbox_engine.model.outputs import Outputs, as_outputs, choose
from gradbox_engine.model.penalties import Tap, Taps
from gradbox_engine.model.precision import autocast
from gradbox_engine.model.sample_rng import SampleStreams
from gradbox_engine.model.shard_feed import Position, call_arguments
from gradbox_engine.model.shard_rng import begin_stream
from gradbox_engine.requests import Group, Precision


@dataclass(frozen=True)
class Passage:
    """A shard's way through the model, with its graph.

    `inputs` are the arguments whose gradients are wanted, as leaves of that graph; `taps` the
    activations under penalties. It is `intact` if those still have their values.
    """

    outputs: Outputs
    inputs: dict[str, Tensor]
    taps: list[tuple[Tap, GradientEdge | None]]  # with their places in the graph
    penalties: list[Tensor]  # their values, where they were wanted
    intact: bool


class ModelCalls:
    """Calls a model's entry points under each shard's own random stream and one precision.

    The global generators are left where a call leaves them, see `preparation`.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Group],
        *,
        seed: int,
        precision: Precision,
        device: torch.device,
        output: str | int | None,
        readout: Callable[[Any, dict[str, Any]], Any] | None,
        differentiated: Mapping[str, Sequence[str]],
        taps: Taps,
        sample_streams: SampleStreams | None,
    ) -> None:
        self.groups = groups
        self._entries = [_entry_point(model, group) for group in groups]
        self._seed = seed
        self._precision = precision
        self._device = device
        self._output = output
        self._readout = readout
        self._differentiated = differentiated
        self._taps = taps
        self._sample_streams = sample_streams

    def __call__(
        self,
        position: Position,
        arguments: dict[str, Any],
        *,
        with_values: bool = False,
        graph: bool = True,
    ) -> Passage:
        """Put a shard through the model and return z with its graph.

        Args:
            with_values: whether to evaluate the penalties; otherwise they wait for the way back.
            graph: whether there is to be one.

        Raises:
            ModelCallFailed: the model or the readout raised; the message says on which shard.
            BadOutput: there is no floating-point tensor where z was looked for.
        """
        leaves = self._leaves(position, arguments)
        arguments = {**arguments, **leaves}
        by_place, by_name = call_arguments(arguments)
        entry = self._entries[position.group]
        self.begin(position)
        with (
            blaming("the model", self.where(position)),
            torch.set_grad_enabled(graph),
            self._drawing(position),
            autocast(self._precision, self._device),
            self._taps.listening(with_values=with_values) as tapped,
        ):
            value = choose(entry(*by_place, **by_name), self._output)
            if self._readout is not None:
                value = self._readout(value, arguments)
        source = "model" if self._readout is None else "readout"
        return Passage(
            outputs=as_outputs(value, source=source),
            inputs=leaves,
            taps=tapped.taps,
            penalties=tapped.values,
            intact=self._taps.all_intact(tapped),
        )

    def begin(self, position: Position) -> None:
        """Put the global generators where a shard's stream begins."""
        begin_stream(self._seed, *self._stream(position))

    @property
    def has_penalties(self) -> bool:
        """Whether a shard matters to L even where its cotangent is zero."""
        return bool(self._taps.penalties)

    def backward(self) -> AbstractContextManager[None]:
        """Return the context in which a shard's backward pass runs."""
        return nullcontext() if self._sample_streams is None else self._sample_streams.backward()

    def _stream(self, position: Position) -> tuple[int, int]:
        streams = self.groups[position.group].streams
        return position if streams is None else streams[position.shard]

    def _drawing(self, position: Position) -> AbstractContextManager[None]:
        if self._sample_streams is None:
            return nullcontext()
        return self._sample_streams.drawing(position, self._device)

    def where(self, position: Position) -> str:
        """Name a shard in a message."""
        return f"group {self.groups[position.group].name!r}, shard {position.shard}"

    def _leaves(self, position: Position, arguments: dict[str, Any]) -> dict[str, Tensor]:
        names = self._differentiated[self.groups[position.group].name]
        return {name: arguments[name].requires_grad_() for name in names}


def _entry_point(model: nn.Module, group: Group) -> Callable[..., Any]:
    if group.method == "forward":
        return model
    method = getattr(model, group.method, None)
    if not callable(method):
        raise BadInputs(
            f"group {group.name!r}: expected a method of {type(model).__name__}, got "
            f"{group.method!r}"
        )
    called: Callable[..., Any] = method
    return called
