"""The batched forward pass, observed at the level of functions: which calls use which parameter.

A module may be called twice, hold its weight elsewhere, or call a function directly; what counts
is the function call that a parameter enters. A tensor made of parameters alone ("derived": a
transposed or sliced weight, a weight-normalised one, position embeddings of shape (1, T, D)) is
tracked as a parameter of its own, whose gradient is pulled back at the end.

`use_log` lists the uses of a probe run. `StepRecorder` runs each use as planned, and records the
output edges of those calls. Gradients are taken with respect to these edges, not to the parameters:
no summed weight gradient is computed, and a later change in place of an output keeps the edge
valid.

Custom Functions, which torch shows to no mode, are shown to these: many make a weight of parameters
alone, quantised, masked, of a few angles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode, handle_torch_function

from gradbox_engine.model.kernels import replaced
from gradbox_engine.per_sample.recording.decompositions import decomposed
from gradbox_engine.torch_private import function_mode_enabled, saved_tensor_hooks
from gradbox_factors import Term

Key = str | tuple[int, int]
"""A parameter's name, or (number of the use that made a derived tensor, position in its output)."""

Terms = Iterator[tuple[Key, Term]]

_SEQUENCES = frozenset({list, tuple})
_NESTED = (list, tuple, dict)
_APPLY: Any = vars(Function)["apply"]


class FunctionCalls(TorchFunctionMode):
    """Calls `use` for every function that a tracked tensor enters."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.tracked: dict[int, Key] = {id(tensor): name for name, tensor in parameters.items()}
        self.called: list[Callable[..., Any]] = []  # all functions, whatever enters them
        self._held: list[Tensor] = []  # so that no other tensor is given their ids

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.called.append(func)
        if not self._any_tracked(args) and not (kwargs and self._any_tracked(kwargs.values())):
            return func(*args, **kwargs)
        parts = decomposed(func, args)
        if parts is not None and not inside_checkpoint():
            with self:
                return parts(*args, **kwargs)
        return self.use(func, args, kwargs)

    def _any_tracked(self, values: Iterable[Any]) -> bool:
        # Called for every function of the model, so without a generator or `isinstance`.
        tracked = self.tracked
        for value in values:
            if id(value) in tracked:
                return True
            if value.__class__ in _SEQUENCES and self._any_tracked(value):
                return True
        return False

    def track(self, tensor: Tensor, key: Key) -> None:
        """Track a derived tensor."""
        self._held.append(tensor)
        self.tracked[id(tensor)] = key

    def use(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that a tracked tensor enters."""
        raise NotImplementedError


def inside_checkpoint() -> bool:
    """Return whether saved tensors are being replaced, as `torch.utils.checkpoint` does.

    What runs there runs again in the backward pass, outside this mode, so it must not be rewritten.
    """
    return saved_tensor_hooks() is not None


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of nested lists, tuples and dicts, in order."""
    # For every call of a probe run; `tree_flatten` takes ten times as long.
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    if isinstance(tree, _NESTED):
        for part in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(part, Tensor):
                found.append(part)
            elif isinstance(part, _NESTED) and part:
                found += tensors_of(part)
    return found


def requires_grad(out: Any) -> bool:
    """Return whether a function's output, or a tensor in it, requires grad."""
    if isinstance(out, Tensor):
        return out.requires_grad
    return isinstance(out, list | tuple) and any(requires_grad(part) for part in out)


@dataclass(frozen=True)
class RecordedEdge:
    """An output whose gradient is wanted: `terms` turns it, g (Y, ...), into (key, term) pairs."""

    edge: GradientEdge
    gradient_bytes: int  # of one output
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
        edge = get_gradient_edge(tensor)
        self.edges.append(RecordedEdge(edge, tensor.nbytes, terms, input_unchanged))


@dataclass(frozen=True)
class Apply:
    """`kind.apply`, equal to that of another call."""

    kind: type[Function]

    @property
    def __name__(self) -> str:
        return f"{self.kind.__name__}.apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _APPLY.__func__(self.kind, *args, **kwargs)


def custom_functions_shown() -> AbstractContextManager[None]:
    """Return a context in which modes see every call of a custom Function as one of an `Apply`."""
    return replaced(Function, "apply", _shown)


@classmethod  # type: ignore[misc]
def _shown(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    function = Apply(cls)
    if function_mode_enabled():
        return handle_torch_function(function, args, *args, **kwargs)
    return function(*args, **kwargs)
