"""The one batched forward, watched at the level of functions: who uses which parameter, and how.

A module may be called twice, hold its weight elsewhere, or call a function directly; what counts
is the function call that a parameter enters. A tensor made of parameters alone ("derived": a
transposed or sliced weight, a weight-normalised one, position embeddings of shape (1, T, D)) is
followed as a parameter of its own, whose gradient is pulled back at the end.

Gradients are later taken with respect to the output edges of those calls, not to the parameters:
no summed weight gradient is computed, and what changes an output in place afterwards does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from gradbox_engine.errors import EngineError
from gradbox_engine.per_sample.planning.batch_axis import BatchAxis
from gradbox_engine.per_sample.planning.reordering import KEEPING, Selection, selection
from gradbox_engine.per_sample.recording.decompositions import opened

Key = str | tuple[int, int]
"""A parameter's name, or (number of the use that made a derived tensor, position in its output)."""


_NESTING = frozenset({list, tuple})


class Watch(TorchFunctionMode):
    """Calls `use` for every function that a tracked tensor enters."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.tracked: dict[int, Key] = {id(tensor): name for name, tensor in parameters.items()}
        self.held: list[Any] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self._within(args) and not (kwargs and self._within(kwargs.values())):
            return func(*args, **kwargs)
        inner = opened(func, args)
        if inner is not None and not inside_checkpoint():
            with self:
                return inner(*args, **kwargs)
        return self.use(func, args, kwargs)

    def _within(self, values: Any) -> bool:
        # Called for every function of the model, so without a generator or `isinstance`.
        tracked = self.tracked
        for value in values:
            if id(value) in tracked:
                return True
            if value.__class__ in _NESTING and self._within(value):
                return True
        return False

    def keys(self, tensors: Sequence[Tensor]) -> tuple[Key | None, ...]:
        """Return the key of each tensor, None for one that is not tracked."""
        return tuple(self.tracked.get(id(tensor)) for tensor in tensors)

    def track(self, tensor: Tensor, key: Key) -> None:
        """Follow a derived tensor; holding it keeps its id from being given to another."""
        self.held.append(tensor)
        self.tracked[id(tensor)] = key

    def use(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that a tracked tensor enters."""
        raise NotImplementedError


def inside_checkpoint() -> bool:
    """Return whether saved tensors are being replaced, as `torch.utils.checkpoint` does.

    What is run there is run again without us during the backward pass, so it must not be rewritten.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of nested lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Record:
    """A use whose output gradient is wanted: `terms` turns g (Y, ...) into (key, term) pairs."""

    edge: GradientEdge
    terms: Callable[[Tensor], Iterator[tuple[Key, Any]]]
    unchanged: Callable[[], bool]


class PlanStale(EngineError):
    """The model took another way than when it was planned; plan anew."""


@dataclass(frozen=True)
class Fold:
    """How often the batch is repeated, (copies, B) in this order.

    One plain backward then gives the gradients of that many outputs.
    """

    copies: int = 1

    def gradient(self, axis: BatchAxis, g: Tensor) -> Tensor:
        """Return an output gradient with outputs and samples leading, (Y, B, ...)."""
        lead = axis.lead(g, 1)
        return lead.reshape(self.copies, -1, *lead.shape[2:]) if self.copies > 1 else lead

    def held_input(self, axis: BatchAxis, x: Tensor) -> Tensor:
        """Return a layer's input with samples leading, (B, ...)."""
        lead = axis.lead(x)
        return lead[: lead.shape[0] // self.copies] if self.copies > 1 else lead


class Run(Watch):
    """Runs the model's uses as planned and records their output edges."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        steps: Sequence[Any],
        *,
        samples: int,
        copies: int = 1,
    ) -> None:
        super().__init__(parameters)
        self.steps = steps
        self.samples = samples  # of all copies; a use that sees another number is not as planned
        # What turns gradients into terms holds this and not the run, which holds them: memory of a
        # run is free as soon as nobody needs it, and not when cycles are collected.
        self.fold = Fold(copies)
        self.at = 0
        self.records: list[Record] = []
        self.derived: dict[Key, Tensor] = {}

    def use(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)  # leaves no sighting either
        if self.at >= len(self.steps):
            out = func(*args, **kwargs)
            if _needs_grad(out):
                raise PlanStale
            return out
        step = self.steps[self.at]
        if step.function != func:
            out = func(*args, **kwargs)
            if _needs_grad(out):
                raise PlanStale
            return out
        return step.run(self, args, kwargs)

    def record(
        self,
        tensor: Tensor,
        terms: Callable[[Tensor], Iterator[tuple[Key, Any]]],
        unchanged: Callable[[], bool] = lambda: True,
    ) -> None:
        """Note that the gradient at `tensor`'s edge is wanted."""
        self.records.append(Record(get_gradient_edge(tensor), terms, unchanged))


def _needs_grad(out: Any) -> bool:
    if isinstance(out, Tensor):
        return out.requires_grad
    return isinstance(out, list | tuple) and any(_needs_grad(part) for part in out)


@dataclass
class Sighting:
    """One use in a trial run, with everything that tells how to treat it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keys: tuple[Key | None, ...]  # of the tensors among the arguments
    inputs: list[Tensor]
    outputs: list[Tensor]
    checkpointed: bool
    module: str


@dataclass
class _Place:
    names: list[str] = field(default_factory=lambda: [""])


class Scan(Watch):
    """Logs every use of a parameter, and of anything that depends on one."""

    def __init__(self, model: torch.nn.Module, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self.model = model
        self.sightings: list[Sighting] = []
        self.selections: list[Selection] = []
        self._counting: set[int] = set()
        self._place = _Place()
        self._hooks: list[Any] = []

    def __enter__(self) -> Scan:
        if not self._hooks:
            for name, module in self.model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # takes no such hooks
                self._hooks.append(module.register_forward_pre_hook(self._entered(name)))
                self._hooks.append(module.register_forward_hook(self._left, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _entered(self, name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            self._place.names.append(name)

        return note

    def _left(self, *_: Any) -> None:
        self._place.names.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        kept = args and self._counts(args[0]) and getattr(func, "__name__", "") in KEEPING
        if func is torch.arange or kept:
            self.held.append(out)
            self._counting.add(id(out))
        return out

    def _counts(self, value: Any) -> bool:
        return id(value) in self._counting

    @property
    def module(self) -> str:
        """The name of the module that runs now."""
        return self._place.names[-1]

    def use(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        picked = selection(func, args, kwargs, self._counts)
        if picked is not None and picked[1]:
            self.selections.append(picked)
        if not _needs_grad(out):
            return out
        number = len(self.sightings)
        inputs, outputs = tensors_of((args, kwargs)), tensors_of(out)
        sighting = Sighting(
            func, args, kwargs, self.keys(inputs), inputs, outputs, inside_checkpoint(), self.module
        )
        self.sightings.append(sighting)
        for position, tensor in enumerate(outputs):
            if tensor.requires_grad:
                self.track(tensor, (number, position))
        return out
