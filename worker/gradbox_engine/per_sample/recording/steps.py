"""How one planned use runs, and what its output gradient gives.

    rule       the layer's own function, then the factors of `layers` and `normalisation`
    copies     a pointwise function: the parameter is expanded to one copy a sample
    birth      an expansion that gives a parameter its batch dim (a class token)
    vmap       any other function, vectorised over samples with one copy of the parameter each
    derived    no sample takes part: the output is followed as a parameter of its own
    loop       none of these: the parameter takes one backward pass a sample

Shapes: B samples, Y outputs, q the tracked tensor. Copies are expanded views: no memory before the
gradient, which is the (Y, B, *q) that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradbox_engine.per_sample.planning.batch_axis import BatchAxis
from gradbox_engine.per_sample.recording.function_calls import Key, PlanStale, Run, tensors_of
from gradbox_engine.per_sample.rules.layers import Layer, Rule, Target
from gradbox_factors import Block, Term

Terms = Iterator[tuple[Key, Term]]


def label(key: Key) -> str:
    """Return what a term of a derived tensor is called until it is pulled back."""
    return key if isinstance(key, str) else f"derived {key[0]}.{key[1]}"


@dataclass(frozen=True)
class Step:
    """One use of a tracked tensor as it is planned; `run` does it."""

    function: Callable[..., Any]
    number: int  # of its sighting
    road: str

    def run(self, capture: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function; the loop road needs nothing more."""
        capture.at += 1
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class DerivedStep(Step):
    """The output is followed as a parameter."""

    shapes: tuple[torch.Size, ...]  # of the tensors that enter and leave, in the trial runs

    def run(self, capture: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        capture.at += 1
        out = self.function(*args, **kwargs)
        if tuple(x.shape for x in (*tensors_of((args, kwargs)), *tensors_of(out))) != self.shapes:
            raise PlanStale  # samples take part in it after all
        parts = [out] if isinstance(out, Tensor) else list(out)
        for position, part in enumerate(parts):
            if isinstance(part, Tensor) and part.requires_grad:
                key = (self.number, position)
                capture.track(part, key)
                capture.derived[key] = part
        return out


@dataclass(frozen=True)
class RuleStep(Step):
    """A function that has a rule."""

    rule: Rule
    input_axis: BatchAxis
    output_axis: BatchAxis
    keys: tuple[tuple[str, Key], ...]  # role, key

    targets: dict[str, Target] = field(default_factory=dict)  # by role, as last seen

    def run(self, capture: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        capture.at += 1
        layer = self.rule.bind(*args, **kwargs)
        if layer is None:
            raise PlanStale
        for role, key in self.keys:
            tensor = layer.parameters[role]
            if tensor is None or capture.tracked.get(id(tensor)) != key:
                raise PlanStale
            target = self.targets.get(role)
            if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
                self.targets[role] = Target(label(key), tuple(tensor.shape), tensor.dtype)
        out = self.function(*args, **kwargs)
        samples = capture.samples
        for axis, tensor in ((self.input_axis, layer.input), (self.output_axis, out)):
            if tensor.shape[axis.dim] != axis.length(samples):
                raise PlanStale  # a layer that sees some of the samples only
        if out.requires_grad:
            if out._is_view():
                # What changes a view in place gives it a new history, in which the edge noted here
                # is missing. This is the same memory as a tensor of its own, whose edge stays.
                out = torch.ops.aten._unsafe_view(out, out.shape)
            self._record(capture, layer, out)
        return out

    def _record(self, capture: Run, layer: Layer, out: Tensor) -> None:
        held = layer.input.detach()
        version = held._version
        dtype, fold = self.targets[self.keys[0][0]].dtype, capture.fold

        def terms(g: Tensor) -> Terms:
            x = fold.held_input(self.input_axis, self.rule.prepare(layer))
            g = fold.gradient(self.output_axis, g)
            if g.dtype != dtype or (x.dtype != dtype and x.is_floating_point()):
                # Autocast: products are made in the parameters' dtype, which is wider.
                x, g = x.to(dtype) if x.is_floating_point() else x, g.to(dtype)
            for term in self.rule.terms(layer, x, g, self.targets):
                yield self._by_label[term.parameter], term

        if self._reads_input:
            capture.record(out, terms, lambda: held._version == version)
        else:
            capture.record(out, terms)

    @cached_property
    def _reads_input(self) -> bool:
        """A bias's gradient is the output's, whatever has become of the input."""
        return any(role != "bias" for role, _ in self.keys)

    @cached_property
    def _by_label(self) -> dict[str, Key]:
        return {label(key): key for _, key in self.keys}


@dataclass(frozen=True)
class CopiesStep(Step):
    """A pointwise function: one copy of each tracked tensor a sample, in the output's layout."""

    output_axis: BatchAxis

    def run(self, capture: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        capture.at += 1
        leaves, tree = tree_flatten((args, kwargs))
        shapes = [x.shape for x in leaves if isinstance(x, Tensor)]
        sizes = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        if sizes[self.output_axis.dim] != self.output_axis.length(capture.samples):
            raise PlanStale
        for position, leaf in enumerate(leaves):
            key = capture.tracked.get(id(leaf)) if isinstance(leaf, Tensor) else None
            if key is not None and leaf.requires_grad:
                leaves[position] = self._copied(capture, leaf, key, sizes)
        args, kwargs = tree_unflatten(leaves, tree)
        return self.function(*args, **kwargs)

    def _copied(self, capture: Run, q: Tensor, key: Key, sizes: torch.Size) -> Tensor:
        dim = self.output_axis.dim
        shape = [1] * (len(sizes) - q.dim()) + list(q.shape)
        if shape[dim] != 1:
            raise PlanStale
        shape[dim] = sizes[dim]
        copies, fold = q.expand(shape), capture.fold

        def terms(g: Tensor) -> Terms:
            lead = fold.gradient(self.output_axis, g)
            if self.output_axis.merged:
                lead = lead.sum((dim + 2, dim + 3))
            array = lead.reshape(*lead.shape[:2], *q.shape).transpose(0, 1)
            yield key, Block(label(key), tuple(q.shape), array)

        capture.record(copies, terms)
        return copies


@dataclass(frozen=True)
class BirthStep(Step):
    """`expand` and its kin: a tracked tensor gets its batch dim here."""

    output_axis: BatchAxis

    def run(self, capture: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        capture.at += 1
        q = args[0]
        key = capture.tracked.get(id(q))
        out = self.function(*args, **kwargs)
        axis = self.output_axis
        if key is None or out.shape[axis.dim] != axis.length(capture.samples):
            raise PlanStale
        shape = [1] * (out.dim() - q.dim()) + list(q.shape)
        del shape[axis.dim]
        fold = capture.fold

        def terms(g: Tensor) -> Terms:
            lead = fold.gradient(axis, g)
            if axis.merged:
                lead = lead.sum((axis.dim + 2, axis.dim + 3))
            dims = [dim + 2 for dim, size in enumerate(shape) if size != lead.shape[dim + 2]]
            array = lead.sum(dims, keepdim=True) if dims else lead
            array = array.reshape(*array.shape[:2], *q.shape).transpose(0, 1)
            yield key, Block(label(key), tuple(q.shape), array)

        capture.record(out, terms)
        return out


@dataclass(frozen=True)
class VmapStep(Step):
    """Any other function, vectorised over samples."""

    input_axes: tuple[BatchAxis | None, ...]  # of the tensors among the arguments
    output_axis: BatchAxis

    def run(self, capture: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        capture.at += 1
        fold = capture.fold

        def record(copies: Tensor, q: Tensor, key: Key) -> None:
            def terms(g: Tensor) -> Terms:
                array = fold.gradient(BatchAxis(0), g).transpose(0, 1)
                yield key, Block(label(key), tuple(q.shape), array)

            capture.record(copies, terms)

        if self._samples(tensors_of((args, kwargs))) != capture.samples:
            raise PlanStale
        return self.vectorised(capture.tracked, args, kwargs, record)

    def vectorised(
        self,
        tracked: Mapping[int, Key],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        record: Callable[[Tensor, Tensor, Key], None],
    ) -> Tensor:
        """Call the function with one copy a sample of each tracked tensor, given to `record`."""
        leaves, tree = tree_flatten((args, kwargs))
        at = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        samples = self._samples([leaves[position] for position in at])
        tensors: list[Tensor] = []
        dims: list[int | None] = []
        for position, axis in zip(at, self.input_axes, strict=True):
            tensor = leaves[position]
            key = tracked.get(id(tensor))
            if key is not None and axis is None and tensor.requires_grad:
                copies = tensor.expand(samples, *tensor.shape)
                record(copies, tensor, key)
                tensors.append(copies)
                dims.append(0)
            else:
                tensors.append(tensor)
                dims.append(None if axis is None else axis.dim)

        def alone(*parts: Tensor) -> Tensor:
            mine = list(leaves)
            for position, axis, part in zip(at, self.input_axes, parts, strict=True):
                mine[position] = part if axis is None else part.unsqueeze(axis.dim)
            inner_args, inner_kwargs = tree_unflatten(mine, tree)
            result: Tensor = self.function(*inner_args, **inner_kwargs)
            return result.squeeze(self.output_axis.dim)

        dim = self.output_axis.dim
        out: Tensor = torch.vmap(alone, in_dims=tuple(dims), out_dims=dim)(*tensors)
        return out

    def _samples(self, tensors: list[Tensor]) -> int:
        for tensor, axis in zip(tensors, self.input_axes, strict=True):
            if axis is not None:
                return tensor.shape[axis.dim]
        raise PlanStale
