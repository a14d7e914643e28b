"""How one use of a parameter is treated: a step for it, chosen by what three probe runs show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.errors import CoupledSamples
from gradbox_engine.model.precision import REPLAY_TOLERANCE
from gradbox_engine.model.tensor_equality import equal_numbers
from gradbox_engine.per_sample.recording.batch_axis import BatchAxis, changed_dim, find
from gradbox_engine.per_sample.recording.function_calls import Key
from gradbox_engine.per_sample.recording.steps import (
    EXPANDING,
    CopiesStep,
    DerivedStep,
    ExpandStep,
    RuleStep,
    Step,
    VmapStep,
    broadcast_size,
)
from gradbox_engine.per_sample.recording.use_log import Use, edges_of, same_calls
from gradbox_engine.per_sample.rules import RULES
from gradbox_engine.per_sample.rules.rule import Layer, Rule
from gradbox_engine.torch_private import tree_flatten, tree_map

LOOP = "loop"
VMAP = "vmap"


@dataclass(frozen=True)
class ProbeUses:
    """The uses of the three probe runs, of which the first was on so many samples."""

    first: Sequence[Use]
    second: Sequence[Use]
    third: Sequence[Use]
    samples: int
    selects: bool = False  # whether data may decide which samples go where

    @property
    def alike(self) -> bool:
        """Whether all three runs called the same functions."""
        return same_calls((self.first, self.second, self.third))


class ProbedUse:
    """One use in the three probe runs; `real` are its parameters and derived tensors."""

    def __init__(self, probes: ProbeUses, number: int, parents: Mapping[Key, Any]) -> None:
        self.probes, self.number = probes, number
        self.first, self.second, self.third = (
            run[number] for run in (probes.first, probes.second, probes.third)
        )
        self.real = tuple(key for key in self.first.keys if key is not None and key in parents)
        self.guesses = False  # whether an order of samples was taken that data may refute

    @property
    def title(self) -> str:
        """The function and where it is called, for people."""
        name = getattr(self.first.function, "__name__", str(self.first.function))
        return f"{name} in {self.first.module or 'the model'}"

    @property
    def why_looped(self) -> str:
        """Why its parameters take one backward pass a sample, for people."""
        if self._bound is None:
            return f"{self.title} has no rule and does not vectorise"
        return f"data decide which samples {self.title} sees, or in which order"

    def axis(self, tensors: Callable[[Use], Sequence[Tensor]], index: int) -> BatchAxis | None:
        """Return which dim of one of the use's tensors holds the samples."""
        first, second, third = (
            tensors(run)[index] for run in (self.first, self.second, self.third)
        )
        axis = find(first, second, third, self.probes.samples)
        if axis is not None and axis.merged and self.probes.selects:
            # Sorted numbers of experts fit an order that they do not have.
            shown = first.is_floating_point() and not equal_numbers(second, third)
            return axis if shown else None
        self.guesses = self.guesses or (axis is not None and axis.guessed)
        return axis

    def step(self) -> Step:
        """Choose the route."""
        function = self.first.function
        runs = (self.first, self.second, self.third)
        if len({(len(run.inputs), len(run.outputs)) for run in runs}) > 1:
            return Step(function, self.number, LOOP)  # `torch.cat([q] * B)`: a tensor a sample
        if self._of_parameters_alone():
            shapes = tuple(x.shape for x in (*self.first.inputs, *self.first.outputs))
            return DerivedStep(function, self.number, "derived", shapes, self._written_later())
        if function is Tensor.__setitem__:
            return Step(function, self.number, LOOP)
        for choose in (self._rule, self._expand, self._copies, self._vmap):
            step = choose()
            if step is not None:
                return step
        return Step(function, self.number, LOOP)

    def _of_parameters_alone(self) -> bool:
        """Return whether no tensor grows with the samples, and no activation enters."""
        activations = any(
            key is not None and key not in self.real and x.requires_grad
            for key, x in zip(self.first.keys, self.first.inputs, strict=True)
        )
        return not activations and not any(dim is not None for dim in self._changes())

    def _written_later(self) -> bool:
        """Return whether a later call wrote to an output, or to a view of it."""
        made = self.first.leaves  # none inside a `torch.func` transform, whose tensors are gone
        with torch.enable_grad():
            return bool(made) and edges_of(self.first.outputs) != made

    def _changes(self) -> list[int | None]:
        pairs = zip(
            (*self.first.inputs, *self.first.outputs),
            (*self.second.inputs, *self.second.outputs),
            strict=True,
        )
        return [changed_dim(one.shape, two.shape) for one, two in pairs]

    def _output_axis(self) -> BatchAxis | None:
        if len(self.first.outputs) != 1:
            return None
        return self.axis(lambda run: run.outputs, 0)

    def _rule(self) -> Step | None:
        output_axis = self._output_axis()
        if self._bound is None or output_axis is None:
            return None
        rule, layer, roles = self._bound
        index = next(i for i, x in enumerate(self.first.inputs) if x is layer.input)
        input_axis = self.axis(lambda run: run.inputs, index)
        if input_axis is None or input_axis.dim >= layer.first_dims:
            return None
        if (input_axis.before, input_axis.after) != (output_axis.before, output_axis.after):
            return None
        return RuleStep(self.first.function, self.number, rule.name, input_axis, output_axis, roles)

    @cached_property
    def _bound(self) -> tuple[Rule, Layer, tuple[tuple[str, Key], ...]] | None:
        """The rule of the use's function, how it reads the call, and which parameters it takes."""
        rule = RULES.get(self.first.function)
        try:
            layer = None if rule is None else rule.bind(*self.first.args, **self.first.kwargs)
        except CoupledSamples as error:
            raise CoupledSamples(f"module {self.first.module!r}: {error}") from None
        roles = None if layer is None else self._roles(layer)
        return None if rule is None or layer is None or roles is None else (rule, layer, roles)

    def _roles(self, layer: Layer) -> tuple[tuple[str, Key], ...] | None:
        """Match the tracked tensors with the layer's parameters; None unless all are matched."""
        known = {
            id(tensor): key
            for tensor, key in zip(self.first.inputs, self.first.keys, strict=True)
            if key in self.real
        }
        roles = tuple(
            (role, known[id(tensor)])
            for role, tensor in layer.parameters.items()
            if tensor is not None and id(tensor) in known
        )
        used = [tensor for tensor in self.first.inputs if id(tensor) in known]
        return roles if len(roles) == len(used) and roles else None

    def _expand(self) -> Step | None:
        axis = self._output_axis()
        if self.first.function not in EXPANDING or axis is None:
            return None
        q, out = self.first.inputs[0], self.first.outputs[0]
        if len(self.first.inputs) > 1 and self.first.keys[1] in self.real:
            return None
        if axis.after % _padded(q, out.dim())[axis.dim]:
            return None
        return ExpandStep(self.first.function, self.number, "birth", axis)

    def _copies(self) -> Step | None:
        axis, use = self._output_axis(), self.first
        if axis is None or use.checkpointed:
            return None
        if use.outputs[0] is use.inputs[0] and use.keys[0] in self.real:
            return None
        for tensor, key in zip(use.inputs, use.keys, strict=True):
            if key in self.real:
                sizes = broadcast_size(use.function, use.args, use.kwargs, tensor)
                if sizes is None or _padded(tensor, len(sizes))[axis.dim] != 1:
                    return None
        return CopiesStep(use.function, self.number, "copies", axis, use.outputs[0].dtype)

    def _vmap(self) -> Step | None:
        """Accept vectorisation only where it reproduces the function's numbers and gradients."""
        changes = self._changes()[: len(self.first.inputs)]
        axes = [
            None if change is None else self.axis(lambda run: run.inputs, index)
            for index, change in enumerate(changes)
        ]
        output_axis = self._output_axis()
        unclear = any(
            change is not None and axis is None for change, axis in zip(changes, axes, strict=True)
        )
        if unclear or output_axis is None or self.first.checkpointed:
            return None
        if self._plain_arguments(self.first) != self._plain_arguments(self.second):
            return None
        if any(out is one for out in self.first.outputs for one in self.first.inputs):
            return None
        # Of leaves: the layer's input may depend on the parameter as well, where it is used twice.
        leaves = {id(x): x.detach().requires_grad_(x.requires_grad) for x in self.first.inputs}
        args, kwargs = tree_map(
            lambda x: leaves.get(id(x), x), (self.first.args, self.first.kwargs)
        )
        # Not what the probe run got from it: later calls may have written to that.
        with torch.enable_grad():
            expected = self.first.function(*args, **kwargs)
        order = tuple(sorted(range(expected.dim()), key=expected.stride, reverse=True))
        step = VmapStep(self.first.function, self.number, VMAP, tuple(axes), output_axis, order)
        tracked = {
            id(leaves[id(tensor)]): key
            for tensor, key in zip(self.first.inputs, self.first.keys, strict=True)
            if key in self.real
        }
        return step if _reproduces(step, expected, tracked, args, kwargs) else None

    def _plain_arguments(self, use: Use) -> str:
        leaves, tree = tree_flatten((use.args, use.kwargs))
        plain = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        return f"{plain}{tree}"


def _reproduces(
    step: VmapStep,
    expected: Tensor,
    tracked: Mapping[int, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    copied: list[tuple[Tensor, Tensor]] = []  # the copies, and what they are of
    try:
        with torch.enable_grad():
            out = step.vectorised(
                tracked, args, kwargs, lambda copies, q, _: copied.append((copies, q))
            )
        if out.shape != expected.shape or not _near(out, expected, expected.dtype):
            return False
        # Under autocast gradients have a wider dtype than the products that they are sums of.
        pairs = zip(*_gradients_of_both(out, expected, copied), strict=True)
        return all(_near(found, own, expected.dtype) for found, own in pairs)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        return False


def _near(found: Tensor, expected: Tensor, rounding: torch.dtype) -> bool:
    near, at_zero = 1e-3, 1e-5
    if rounding.itemsize == 2:  # a sum of several terms is rounded for each
        near = REPLAY_TOLERANCE[rounding]
        at_zero = near * float(
            expected.detach().float().nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()
        )
    return torch.allclose(found, expected, rtol=near, atol=at_zero, equal_nan=True)


def _gradients_of_both(
    out: Tensor, expected: Tensor, copied: Sequence[tuple[Tensor, Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of each copied tensor: summed over its copies, and the function's own.

    A batching rule may be right forward and wrong backward.
    """
    if not expected.requires_grad or not copied:
        return [], []
    of = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    found = torch.autograd.grad(
        out, [copies for copies, _ in copied], of, retain_graph=True, allow_unused=True
    )
    own = torch.autograd.grad(
        expected, [q for _, q in copied], of, retain_graph=True, allow_unused=True
    )
    pairs = [(f, o) for f, o in zip(found, own, strict=True) if f is not None and o is not None]
    return [f.sum(0) for f, _ in pairs], [o for _, o in pairs]


def _padded(q: Tensor, num_dims: int) -> list[int]:
    """Return the shape that q is broadcast from."""
    return [1] * (num_dims - q.dim()) + list(q.shape)
