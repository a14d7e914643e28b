"""What uses of parameters a probe run makes, and by which edges of its graph each is entered.

Some uses no function call shows: a derivative that a model takes of itself depends on its
parameters by operations of the backward pass; a `torch.func` transform, a scripted function and
what runs under `DisableTorchFunction` are not seen either. Their rows would lack what such a use
adds, and where that is little, as it may be beside the rounding of 16 bits, no comparison of
numbers tells. So they are looked for in the graph.

From what a function returned, every path to a parameter has to pass what entered the function, or
what another one returned. A path that does not is an unseen use. Tensors made of parameters alone
count as parameters here: a path may pass them where they entered, but not where a write to a view
of one had given it another edge, behind which the write is.

Not seen: a custom Function that reads parameters which are not its arguments, and makes their
gradients by a `backward` of its own; `gradients.asked_for` is about these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from gradbox_engine.per_sample.recording.function_calls import (
    FunctionCalls,
    Key,
    inside_checkpoint,
    requires_grad,
    tensors_of,
)
from gradbox_engine.per_sample.recording.index_selections import (
    KEEPING_RANGES,
    Selection,
    selection,
)
from gradbox_engine.per_sample.recording.shared_numbers import SampleSizes, sizes_of
from gradbox_engine.torch_private import base_of, inside_transform

Edge = tuple[Node, int]
"""Where autograd brings a tensor's gradient: a node, and the number of its output."""


@dataclass
class Use:
    """One call that a tracked tensor entered in a probe run."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keys: tuple[Key | None, ...]  # of `inputs`; None for a tensor that is not tracked
    inputs: list[Tensor]
    outputs: list[Tensor]
    checkpointed: bool
    module: str
    enters: tuple[frozenset[Edge], ...]  # of each of `inputs`, before the call; none if not tracked
    leaves: frozenset[Edge]  # of the outputs
    within: frozenset[Edge]  # of what outputs are views of, which a later write to them goes to


class UseLog(FunctionCalls):
    """Lists every use of a parameter, and of anything that depends on one.

    Args:
        model: where hooks tell which module a use is in; None: nobody asks.
    """

    def __init__(self, model: torch.nn.Module | None, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self.uses: list[Use] = []
        self.selections: list[Selection] = []
        self.sizes: list[SampleSizes] = []  # of all calls
        self._model = model
        self._ranges: set[int] = set()  # ids of what `torch.arange` made
        self._modules = [""]  # the modules that run now, the innermost last
        self._hooks: list[Any] = []

    def __enter__(self) -> UseLog:
        # Entered again for each decomposed function.
        if self._model is not None and not self._hooks:
            for name, module in self._model.named_modules():
                self._hooks.append(module.register_forward_pre_hook(self._entering(name)))
                self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def remove_hooks(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._modules.append(name)

        return enter

    def _leave(self, *_: Any) -> None:
        self._modules.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        self.sizes.append(sizes_of(func, args, kwargs or {}, out))
        of_range = args and self._is_range(args[0])
        if func is torch.arange or (of_range and getattr(func, "__name__", "") in KEEPING_RANGES):
            self._held.append(out)
            self._ranges.add(id(out))
        return out

    def _is_range(self, value: Any) -> bool:
        return id(value) in self._ranges

    def use(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = tensors_of((args, kwargs))
        keys = tuple(self.tracked.get(id(tensor)) for tensor in inputs)
        entering = [() if key is None else (x,) for x, key in zip(inputs, keys, strict=True)]
        enters = [edges_of(x) for x in entering]
        bases = [edges_of(self._hidden_bases(x)) for x in entering]
        out = func(*args, **kwargs)
        selected = selection(func, args, kwargs, self._is_range)
        if selected is not None and selected[1]:
            self.selections.append(selected)
        written = args[0] if func is Tensor.__setitem__ else out
        if not requires_grad(written) or not torch.is_grad_enabled():  # `to` may return its input
            return out
        number, outputs = len(self.uses), tensors_of(written)
        if any(x is one for x in outputs for one in inputs):  # to a view: it goes to what it is of
            enters = [own | base for own, base in zip(enters, bases, strict=True)]
        self.uses.append(
            Use(
                function=func,
                args=args,
                kwargs=kwargs,
                keys=keys,
                inputs=inputs,
                outputs=outputs,
                checkpointed=inside_checkpoint(),
                module=self._modules[-1],
                enters=tuple(enters),
                leaves=edges_of(outputs),
                within=edges_of(self._hidden_bases(outputs)),
            )
        )
        for position, tensor in enumerate(outputs):
            if tensor.requires_grad:
                self.track(tensor, (number, position))
        return out

    def _hidden_bases(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return what the tensors are views of and no call returned, as within `F.linear`."""
        bases = map(base_of, tensors)
        return [base for base in bases if base is not None and id(base) not in self.tracked]


def edges_of(tensors: Iterable[Tensor]) -> frozenset[Edge]:
    """Return the edges of those tensors that require grad.

    None where there is no graph, and none inside a `torch.func` transform, which has its own.
    """
    if not torch.is_grad_enabled() or inside_transform():
        return frozenset()
    found = (get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad)
    return frozenset((edge.node, edge.output_nr) for edge in found)


def same_calls(runs: Sequence[Sequence[Use]]) -> bool:
    """Return whether all runs called the same functions in the same order."""
    functions = [[use.function for use in run] for run in runs]
    return all(called == functions[0] for called in functions)


def unseen_uses(
    uses: Sequence[Use],
    ends: Iterable[Edge],
    derived: Collection[int],
    parameters: Mapping[str, Tensor],
) -> set[str]:
    """Return the parameters with a use that is not among `uses`.

    Args:
        uses: of one run, whose graph is alive.
        ends: the edges of z.
        derived: the numbers of the uses that make tensors of parameters alone.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    returned = [use.leaves | use.within for n, use in enumerate(uses) if n not in derived]
    seen = frozenset().union(*returned)
    found = _behind(set(ends) - seen, names, lambda edge: edge in seen)
    for use in uses:
        enters = _entered(use, uses, derived)
        closed = partial(_ends_at, use, enters, seen)
        found |= _behind(use.leaves - enters, names, closed)
    return found


def _entered(use: Use, uses: Sequence[Use], derived: Collection[int]) -> frozenset[Edge]:
    """Return the edges by which tracked tensors entered a function, as they were made."""
    moved = (
        isinstance(key, tuple) and key[0] in derived and not edges & uses[key[0]].leaves
        for key, edges in zip(use.keys, use.enters, strict=True)
    )
    return frozenset().union(*(e for e, m in zip(use.enters, moved, strict=True) if not m))


def _ends_at(use: Use, enters: Collection[Edge], seen: Collection[Edge], edge: Edge) -> bool:
    """Return whether a path from what a function returned has left the function at this edge."""
    return edge in enters or (edge in seen and edge not in use.within)


def _behind(
    starts: Iterable[Edge], names: Mapping[int, str], closed: Callable[[Edge], bool]
) -> set[str]:
    """Return the parameters to which a path leads that passes nothing closed."""
    left, visited, found = [node for node, _ in starts], set(), set()
    while left:
        node = left.pop()
        if node in visited:
            continue
        visited.add(node)
        if not node.next_functions:
            name = names.get(id(getattr(node, "variable", None)))
            found |= set() if name is None else {name}
        for following, output in node.next_functions:
            if following is not None and not closed((following, output)):
                left.append(following)
    return found
