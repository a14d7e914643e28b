"""Runs a model's uses of parameters as planned, and records the output edges of those calls.

Gradients are taken with respect to these edges, not to the parameters: no summed weight gradient is
computed, and a later change in place of an output keeps the edge valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradbox_engine.per_sample.recording.function_calls import FunctionCalls, Key, requires_grad
from gradbox_factors import Term

Terms = Iterator[tuple[Key, Term]]


@dataclass(frozen=True)
class RecordedEdge:
    """An output whose gradient is wanted: `terms` turns it, g (Y, ...), into (key, term) pairs."""

    edge: GradientEdge
    terms: Callable[[Tensor], Terms]
    input_unchanged: Callable[[], bool]


class StepRecorder(FunctionCalls):
    """Runs each use by its step of the plan.

    A call that is not as planned sets `deviated`; from then on functions run as they are, and the
    graph is of no use.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], steps: Sequence[Any], *, samples: int
    ) -> None:
        super().__init__(parameters)
        self.samples = samples  # a use that sees another number is not as planned
        self.deviated = False
        self.edges: list[RecordedEdge] = []
        self.derived: dict[Key, Tensor] = {}
        self._steps = steps
        self._next = 0

    def use(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.deviated or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        step = self._steps[self._next] if self._next < len(self._steps) else None
        if step is None or step.function != func:
            out = func(*args, **kwargs)
            self.deviated = requires_grad(out)  # without, the probe runs list no use either
            return out
        self._next += 1
        return step.run(self, args, kwargs)

    def deviate(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call that is not as planned."""
        self.deviated = True
        return func(*args, **kwargs)

    def finish(self) -> None:
        """Note a deviation if steps are left."""
        self.deviated = self.deviated or self._next != len(self._steps)

    def record(
        self,
        tensor: Tensor,
        terms: Callable[[Tensor], Terms],
        input_unchanged: Callable[[], bool] = lambda: True,
    ) -> None:
        """Record that the gradient at `tensor`'s edge is wanted."""
        self.edges.append(RecordedEdge(get_gradient_edge(tensor), terms, input_unchanged))
