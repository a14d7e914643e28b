"""One call of the model on one shard, the same in the first pass and in the replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from gradbox_engine.errors import BadInputs, EngineError, ModelCallFailed
from gradbox_engine.feed import Position, call_arguments
from gradbox_engine.job import Group, Precision
from gradbox_engine.outputs import Outputs, as_outputs, choose
from gradbox_engine.precision import autocast
from gradbox_engine.streams import shard_stream


@dataclass(frozen=True)
class Passage:
    """A shard's way through the model, with its graph.

    `inputs` are the arguments whose gradients are wanted, as leaves of that graph.
    """

    outputs: Outputs
    inputs: dict[str, Tensor]


class ModelCalls:
    """Calls a model's entry points under each shard's own random stream and one precision."""

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
        input_patterns: Sequence[str],
    ) -> None:
        self.groups = groups
        self._entries = [_entry_point(model, group) for group in groups]
        self._seed = seed
        self._precision = precision
        self._device = device
        self._output = output
        self._readout = readout
        self._input_patterns = input_patterns

    def __call__(self, position: Position, arguments: dict[str, Any]) -> Passage:
        """Put a shard through the model and return z with its graph.

        Raises:
            ModelCallFailed: the model or the readout raised; the message says on which shard.
            BadOutput: there is no floating-point tensor where z was looked for.
        """
        leaves = self._leaves(position, arguments)
        arguments = {**arguments, **leaves}
        by_place, by_name = call_arguments(arguments)
        entry = self._entries[position.group]
        with (
            blaming("the model", self.where(position)),
            torch.enable_grad(),
            shard_stream(self._seed, *position),
            autocast(self._precision, self._device),
        ):
            value = choose(entry(*by_place, **by_name), self._output)
            if self._readout is not None:
                value = self._readout(value, arguments)
        source = "model" if self._readout is None else "readout"
        return Passage(as_outputs(value, source=source), leaves)

    def where(self, position: Position) -> str:
        """Name a shard in a message."""
        return f"group {self.groups[position.group].name!r}, shard {position.shard}"

    def _leaves(self, position: Position, arguments: dict[str, Any]) -> dict[str, Tensor]:
        group = self.groups[position.group].name
        return {
            name: value.requires_grad_()
            for name, value in arguments.items()
            if isinstance(value, Tensor)
            and value.is_floating_point()
            and any(
                fnmatchcase(name, pattern) or fnmatchcase(f"{group}.{name}", pattern)
                for pattern in self._input_patterns
            )
        }


class blaming:  # noqa: N801 - reads as a phrase: with blaming("the model", "shard 3")
    """Turn what foreign code raises into ModelCallFailed, which says where it was called.

    The engine's own errors and running out of memory pass unchanged.
    """

    def __init__(self, what: str, where: str) -> None:
        self._what = what
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, EngineError | torch.OutOfMemoryError | MemoryError):
            return
        if isinstance(error, Exception):
            raise ModelCallFailed(
                f"{self._where}: {self._what} raised {type(error).__name__}: {error}"
            ) from error


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
