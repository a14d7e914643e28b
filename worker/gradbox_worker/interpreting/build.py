"""From a graph and its tensors to a function.

The function is an interpreter over the graph's nodes: it looks each operation up in the allow-list
and calls it. No source code is generated and none is evaluated. Autograd sees the same calls in the
same order as it would have seen from the Python function, so value and gradients are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import torch

from gradbox.errors import InvalidInputs
from gradbox.graphs.check import check_graph
from gradbox.graphs.schema import Graph
from gradbox_worker.interpreting.in_place_copies import Copies, uncopied
from gradbox_worker.interpreting.program import COPIES, OUTER, TENSORS, Program, Values

# A loss comes back with every step of a training loop. Of larger graphs no program is kept.
_KEPT_PROGRAMS: Final = 32
_KEPT_CHARACTERS: Final = 2**16


def build(
    graph: Graph,
    tensors: Mapping[str, torch.Tensor],
    *,
    device: torch.device | str,
    buffers: Collection[str] = (),
) -> GraphFunction:
    """Make a function of a graph.

    Args:
        graph: what `trace` made, or what a client posted: it is checked first.
        tensors: the constants and parameters it reads, by name. Those that require grad
            get gradients.
        device: where the function runs; its factories (`torch.eye`) make their tensors there,
            whatever device its author had.
        buffers: the names of tensors whose values after a call are wanted: `GraphFunction.buffers`.

    Raises:
        GraphRefused: `check_graph` refuses it.
    """
    text = repr(graph.model_dump())
    program = _program if len(text) <= _KEPT_CHARACTERS else _program.__wrapped__
    made = program(_Posted(text, graph), frozenset(tensors), torch.device(device))
    return GraphFunction(made, tensors, buffers)


class GraphFunction:
    """A graph that can be called, with its arguments by position or by name.

    Where the graph writes in place, it works on copies: the tensors that it is given, at any depth,
    and those that it was built with are as they were after every call.

    Attributes:
        arguments: the names of its arguments in order.
        buffers: what the last call left in each tensor named as a buffer, without its graph. Before
            the first call it is empty.
    """

    def __init__(
        self, program: Program, tensors: Mapping[str, torch.Tensor], buffers: Collection[str]
    ) -> None:
        self.arguments = program.arguments
        self.buffers: dict[str, torch.Tensor] = {}
        self._program = program
        self._tensors = {name: tensors[name].to(program.device) for name in program.reads}
        self._kept = [name for name in program.reads if name in buffers]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the graph.

        Raises:
            InvalidInputs: the arguments given are not the graph's.
        """
        grad_enabled = torch.is_grad_enabled()
        values = {OUTER: grad_enabled, COPIES: Copies(grad_enabled=grad_enabled)}
        values[TENSORS] = self._tensors
        values |= self._bind(args, kwargs, values)
        program = self._program
        try:
            for step in program.steps:
                try:
                    values[step.name] = step.run(values)
                except Exception as error:
                    error.add_note(f"operation: {step.operation}")
                    raise
                for name in step.last_used:
                    del values[name]
            self.buffers = {
                name: program.own(self._tensors[name], values).detach() for name in self._kept
            }
            return uncopied(program.output(values))
        finally:
            torch.set_grad_enabled(grad_enabled)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any], values: Values) -> Values:
        by_position = dict(zip(self.arguments, args, strict=False))
        given = {**by_position, **kwargs}
        if (
            set(given) != set(self.arguments)
            or len(args) > len(self.arguments)
            or by_position.keys() & kwargs
        ):
            raise InvalidInputs(
                f"the function's arguments are {', '.join(self.arguments) or 'none'}; it got "
                f"{len(args)} by position and by name: {', '.join(kwargs) or 'none'}"
            )
        return {
            name: self._program.own(given[argument], values)
            for name, argument in zip(self._program.names, self.arguments, strict=True)
        }


@dataclass(frozen=True)
class _Posted:
    """A graph; two are the same where `text` is."""

    text: str
    graph: Graph = field(compare=False)


@lru_cache(_KEPT_PROGRAMS)
def _program(posted: _Posted, tensors: frozenset[str], device: torch.device) -> Program:
    """Check a graph and make its program; raises as `check_graph` does."""
    check_graph(posted.graph, tensors)
    return Program(posted.graph, device)
