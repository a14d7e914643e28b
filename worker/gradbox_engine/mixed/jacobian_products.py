"""Products with J = ∂v/∂z of one shard: aᵀJ by reverse mode, and Ju in two ways.

By forward mode a call of the model carries the tangent along: no graph, two forwards' work. Where
an operation has no forward-mode rule, Ju is the derivative of the map p ↦ (pᵀJ)u: a forward and a
backward with a graph, that of the backward too, and one backward through it. The map is linear but
for backward passes that a hook bends (gradients clipped on their way), so it is taken at p = a,
where the first pass was.

Both can be wrong without an error. Forward mode goes through a model's own `torch.no_grad()`, where
reverse mode stops; and double backward leaves out a backward pass that a hook runs without a record
of it, as implicit layers do: the caller compares ⟨a, Ju⟩ with ⟨aᵀJ, u⟩. Nor does autograd mention a
backward marked `once_differentiable`: its mark in the graph is looked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gradbox_engine.errors import BadInputs, BadOutput, ModelCallFailed, NoTangent
from gradbox_engine.mixed.forward_rules import LeanRules, Roundings, dual, parts
from gradbox_engine.model.calling.blame import blaming
from gradbox_engine.model.calling.calls import ShardGraph
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.kernels import checkpoints_inlined, forward_mode_checkpoints
from gradbox_engine.model.precision import (
    REPLAY_TOLERANCE,
    accumulation_dtype,
    fp16_scale,
    replay_tolerance,
)
from gradbox_engine.model.prepared import Prepared
from gradbox_engine.torch_private import has_dead_end

WITHOUT_RULE = re.compile(r"Trying to use forward AD with (\S+) that does not support it")
WITHOUT_JVP = "You must implement the jvp function for custom autograd.Function"


@dataclass(frozen=True)
class Linearised:
    """v of a shard and a product with its Jacobian, without a graph. Ju has the names of v.

    `rounding` is the dtype with the fewest digits on the way.
    """

    outputs: Outputs
    tangents: Outputs
    rounding: torch.dtype


class ShardJacobians:
    """Products with the Jacobians of shards, each by calls of the model under its own stream."""

    def __init__(self, ready: Prepared, *, argument: str | None, scaled: bool) -> None:
        """Choose z.

        Args:
            argument: the shards' argument that is z; None takes the first shard's first
                floating-point one.
            scaled: whether what is multiplied with J is first brought to a largest entry of 1,
                so that it passes through float16.
        """
        self._calls = ready.calls
        self._feed = ready.feed
        self._precision = ready.options.precision
        self._argument = argument or next(_real(ready.calls.groups[0].shards[0]), None)
        self.scaled = scaled

    def transposed(
        self, position: Position, cotangents: Callable[[Outputs], Outputs]
    ) -> tuple[Outputs, Tensor]:
        """Return v and aᵀJ, of the shape of z: one forward and one backward.

        Args:
            cotangents: a, given v.

        Raises:
            BadInputs: the shard has no floating-point argument to be z.
            BadOutput: v does not depend on z.
        """
        arguments, name, z = self._take(position)
        leaf = z.requires_grad_()
        with torch.enable_grad():
            # A copy, for the model may write to its argument, and a leaf must not be written to.
            graph = self._calls(position, {**arguments, name: leaf.clone()})
        differentiable = {n: v for n, v in graph.outputs.items() if v.requires_grad}
        if not differentiable:
            raise BadOutput(
                f"{self._calls.where(position)}: expected an output that depends on the argument "
                f"{name!r}, got one that does not; name the argument to differentiate by z="
            )
        a = cotangents(graph.outputs)
        a = {name: cotangent for name, cotangent in a.items() if name in differentiable}
        scale = self._scale(list(a.values()))
        with blaming("the backward pass", self._calls.where(position)), self._calls.backward():
            if a:
                torch.autograd.backward(
                    [differentiable[n] for n in a],
                    [(cotangent * scale).to(differentiable[n].dtype) for n, cotangent in a.items()],
                )
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        outputs = {n: v.detach() for n, v in graph.outputs.items()}
        if self.scaled:  # of a float16 z: in float32, which holds it
            gradient = gradient.to(accumulation_dtype(gradient.dtype)) / scale
        return outputs, gradient

    def forward_mode(self, position: Position, u: Tensor) -> Linearised:
        """Return v and Ju: one call that keeps no graph.

        Raises:
            ModelCallFailed: most likely an operation has no rule; see `missing_rule`.
        """
        arguments, name, z = self._take(position)
        scale = self._scale([u])
        with forward_ad.dual_level(), forward_mode_checkpoints(), LeanRules() as rules:
            moving = dual(z, (u * scale).to(z.dtype).view_as(z))
            graph = self._calls(position, {**arguments, name: moving}, recompute=False)
            pairs = {n: parts(v) for n, v in graph.outputs.items()}
        return _linearised(pairs, scale, rules.rounding)

    def double_transposed(
        self, position: Position, u: Tensor, cotangents: Callable[[Outputs], Outputs]
    ) -> Linearised:
        """Return v and Ju as the derivative of p ↦ (pᵀJ)u at a: a graph of the model, and twice.

        Args:
            cotangents: a, given v.

        Raises:
            NoTangent: an operation cannot be differentiated twice.
        """
        arguments, name, z = self._take(position)
        scale = self._scale([u])
        leaf = z.requires_grad_()
        with torch.enable_grad(), checkpoints_inlined():
            with Roundings() as seen:
                graph = self._calls(position, {**arguments, name: leaf.clone()}, recompute=False)
            a = cotangents(graph.outputs)
            moving = (u * scale).to(z.dtype).view_as(z)
            tangents = self._twice(position, graph, leaf, a, moving)
        pairs = {n: (v, tangents.get(n)) for n, v in graph.outputs.items()}
        return _linearised(pairs, scale, seen.rounding)

    def tolerance(self, dtype: torch.dtype, rounding: torch.dtype) -> float:
        """Return how far two products of `dtype` may differ, to the largest that they could be.

        Args:
            rounding: the dtype with the fewest digits on the way.
        """
        tolerance = replay_tolerance(self._precision, dtype)
        tolerance = max(tolerance, REPLAY_TOLERANCE.get(rounding, REPLAY_TOLERANCE[torch.bfloat16]))
        return max(tolerance, REPLAY_TOLERANCE["fp16"]) if self.scaled else tolerance

    def no_tangent(self, position: Position, obstacle: str) -> NoTangent:
        """Return the error that neither way gives Ju, because of an obstacle."""
        return NoTangent(
            f"{self._calls.where(position)}: expected every operation to have a forward-mode rule "
            f"or a backward that can be differentiated again, got {obstacle}; give a custom "
            f"autograd.Function a jvp, or a backward made of differentiable operations, let a "
            f"hook pass create_graph=True, and write an operation of torch's own out of simpler "
            f"ones"
        )

    def _twice(
        self, position: Position, graph: ShardGraph, leaf: Tensor, a: Outputs, u: Tensor
    ) -> dict[str, Tensor | None]:
        differentiable = {n: v for n, v in graph.outputs.items() if v.requires_grad}
        scale = self._scale([a[n] for n in differentiable if n in a])
        probes = {
            n: ((a[n] * scale).to(v.dtype) if n in a else torch.zeros_like(v)).requires_grad_()
            for n, v in differentiable.items()
        }
        try:
            with (
                blaming("the second backward pass", self._calls.where(position)),
                self._calls.backward(),
            ):
                (product,) = torch.autograd.grad(
                    list(differentiable.values()), leaf, list(probes.values()), create_graph=True
                )
                if has_dead_end(product):
                    raise self.no_tangent(position, "a backward marked once_differentiable")
                gradients = torch.autograd.grad(
                    product, list(probes.values()), u, allow_unused=True
                )
        except ModelCallFailed as error:
            raise self.no_tangent(position, str(error.__cause__)) from error
        return dict(zip(probes, gradients, strict=True))

    def _take(self, position: Position) -> tuple[dict[str, Any], str, Tensor]:
        arguments, name = self._feed.take(position), self._argument
        real = list(_real(arguments))
        if name not in real:
            raise BadInputs(
                f"{self._calls.where(position)}: expected a floating-point argument for z, one of "
                f"{real}, got z={name!r} of {sorted(arguments)}; an integer argument has no "
                f"derivative"
            )
        return arguments, name, arguments[name]

    def _scale(self, tensors: list[Tensor]) -> float:
        return fp16_scale(tensors, largest=1.0) if self.scaled else 1.0


def _real(arguments: Mapping[str, Any]) -> Iterator[str]:
    return (n for n, v in arguments.items() if isinstance(v, Tensor) and v.is_floating_point())


def missing_rule(error: ModelCallFailed) -> str:
    """Name the operation that forward mode could not pass."""
    message = str(error.__cause__)
    match = WITHOUT_RULE.search(message)
    if match is not None:
        return match.group(1).removeprefix("aten::")
    if message.startswith(WITHOUT_JVP):
        return "a custom autograd.Function"
    return f"{type(error.__cause__).__name__}: {message.splitlines()[0] if message else ''}"


def _linearised(
    pairs: dict[str, tuple[Tensor, Tensor | None]], scale: float, rounding: torch.dtype
) -> Linearised:
    outputs, tangents = {}, {}
    for name, (value, tangent) in pairs.items():
        outputs[name] = value.detach()
        wide = accumulation_dtype(value.dtype)
        tangents[name] = (
            torch.zeros_like(outputs[name], dtype=wide)
            if tangent is None
            else tangent.detach().to(wide) / scale
        )
    return Linearised(outputs, tangents, rounding)
