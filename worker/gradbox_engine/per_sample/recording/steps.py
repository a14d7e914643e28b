"""How one planned use of a tracked tensor runs, and what the gradient at its output gives.

    rule       the layer's own function, then the factors that its rule makes
    copies     a function that broadcasts the parameter, which is expanded to one copy a sample
    birth      an expansion that gives a parameter its dim of samples (a class token)
    vmap       any other function, vectorised over samples with one copy of the parameter each
    derived    no sample takes part: the output is tracked as a parameter of its own
    loop       none of these: the parameter takes one backward pass a sample

The first column is what users read in `roads`, where a rule has its own name.

Shapes: B samples, Y outputs, q the tracked tensor. Copies are expanded views: no memory before the
gradient, which is the (Y, B, *q) that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradbox_engine.per_sample.recording.batch_axis import BatchAxis
from gradbox_engine.per_sample.recording.function_calls import Key, StepRecorder, Terms, tensors_of
from gradbox_engine.per_sample.rules import RULES
from gradbox_engine.per_sample.rules.rule import Layer, Rule, Target
from gradbox_engine.torch_private import (
    same_memory,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    version_of,
)
from gradbox_factors import Block

# Functions of which an argument may be replaced by its broadcast copies: those that act entry by
# entry, beside the mask that attention adds to its scores.
_NAMES = """
add sub mul div true_divide divide multiply subtract floor_divide pow maximum minimum lerp
addcmul addcdiv atan2 hypot where logaddexp fmax fmin clamp
""".split()

_OPERATORS = """
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__
add_ sub_ mul_ div_ __iadd__ __isub__ __imul__ __itruediv__
""".split()


def _named(names: list[str], *owners: Any) -> set[Callable[..., Any]]:
    return {getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)}


POINTWISE = _named(_NAMES, torch, Tensor) | _named(_OPERATORS, Tensor) | _named(["rsub"], torch)
EXPANDING = _named(["expand", "expand_as", "repeat"], Tensor) | {
    torch.broadcast_to,
    Tensor.broadcast_to,
    torch.tile,
    Tensor.tile,
}


def label(key: Key) -> str:
    """Return what a term of a derived tensor is called until it is pulled back."""
    return key if isinstance(key, str) else f"derived {key[0]}.{key[1]}"


@dataclass(frozen=True)
class Step:
    """One planned use of a tracked tensor; `run` does it."""

    function: Callable[..., Any]
    number: int  # of the use in the probe runs
    route: str

    def run(self, recorder: StepRecorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function; the loop needs nothing more."""
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class DerivedStep(Step):
    """The output, or what an assignment writes to, is tracked as a parameter."""

    shapes: tuple[torch.Size, ...]  # of the input and output tensors in the probe runs
    written_later: bool  # which moves a tensor and its views on in the graph

    def run(self, recorder: StepRecorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self.function(*args, **kwargs)
        made = args[0] if self.function is Tensor.__setitem__ else out
        if tuple(x.shape for x in (*tensors_of((args, kwargs)), *tensors_of(made))) != self.shapes:
            recorder.deviated = True  # samples take part in it after all
            return out
        parts = [made] if isinstance(made, Tensor) else list(made)
        for position, part in enumerate(parts):
            if isinstance(part, Tensor) and part.requires_grad:
                key = (self.number, position)
                recorder.track(part, key)
                recorder.derived[key] = same_memory(part) if self.written_later else part
        return out


@dataclass(frozen=True)
class RuleStep(Step):
    """A function that has a rule."""

    input_axis: BatchAxis
    output_axis: BatchAxis
    keys: tuple[tuple[str, Key], ...]  # role, key

    targets: dict[str, Target] = field(default_factory=dict)  # by role, as last seen

    @property
    def rule(self) -> Rule:
        """The rule of the function."""
        return RULES[self.function]

    def run(self, recorder: StepRecorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self.rule.bind(*args, **kwargs)
        if layer is None:
            return recorder.deviate(self.function, args, kwargs)
        for role, key in self.keys:
            tensor = layer.parameters[role]
            if tensor is None or recorder.tracked.get(id(tensor)) != key:
                return recorder.deviate(self.function, args, kwargs)
            target = self.targets.get(role)
            if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
                self.targets[role] = Target(label(key), tuple(tensor.shape), tensor.dtype)
        out = self.function(*args, **kwargs)
        samples = recorder.samples
        for axis, tensor in ((self.input_axis, layer.input), (self.output_axis, out)):
            if tensor.shape[axis.dim] != axis.length(samples):
                recorder.deviated = True  # a layer that sees some of the samples only
                return out
        if out.requires_grad:
            self._record(recorder, layer, out)
            # Another node for the same memory, and no view: autograd takes the gradient at an edge
            # before it calls the tensor's hooks, and a change in place of a view replaces its edge.
            out = same_memory(out)
        return out

    def _record(self, recorder: StepRecorder, layer: Layer, out: Tensor) -> None:
        held = layer.input.detach()
        version = version_of(held)
        dtype = self.targets[self.keys[0][0]].dtype

        def terms(g: Tensor) -> Terms:
            x, g = self.input_axis.lead(self.rule.prepare(layer)), self.output_axis.lead(g, 1)
            if g.dtype != dtype or (x.dtype != dtype and x.is_floating_point()):
                # Autocast: products are made in the parameters' dtype, which is wider; or the
                # gradient is, which went through float16.
                wide = torch.promote_types(dtype, g.dtype)
                x, g = x.to(wide) if x.is_floating_point() else x, g.to(wide)
            for term in self.rule.terms(layer, x, g, self.targets):
                yield self._by_label[term.parameter], term

        if self._reads_input:
            recorder.record(out, terms, lambda: version_of(held) == version)
        else:
            recorder.record(out, terms)

    @cached_property
    def _reads_input(self) -> bool:
        """Whether a change in place of the input matters: a bias's gradient does not read it."""
        return any(role != "bias" for role, _ in self.keys)

    @cached_property
    def _by_label(self) -> dict[str, Key]:
        return {label(key): key for _, key in self.keys}


@dataclass(frozen=True)
class CopiesStep(Step):
    """A function that broadcasts: one copy of each tracked tensor a sample, as in the output."""

    output_axis: BatchAxis
    dtype: torch.dtype  # of the output without copies; those of a 0-dim tensor may widen it

    def run(self, recorder: StepRecorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        dim = self.output_axis.dim
        for position, leaf in enumerate(leaves):
            key = recorder.tracked.get(id(leaf)) if isinstance(leaf, Tensor) else None
            if key is None or not leaf.requires_grad:
                continue
            sizes = broadcast_size(self.function, args, kwargs, leaf)
            if sizes is None or sizes[dim] != self.output_axis.length(recorder.samples):
                return recorder.deviate(self.function, args, kwargs)
            shape = [1] * (len(sizes) - leaf.dim()) + list(leaf.shape)
            if shape[dim] != 1:
                return recorder.deviate(self.function, args, kwargs)
            shape[dim] = sizes[dim]
            leaves[position] = self._copied(recorder, leaf, key, shape)
        args, kwargs = tree_unflatten(leaves, tree)
        out = self.function(*args, **kwargs)
        return out.to(self.dtype) if isinstance(out, Tensor) else out

    def _copied(self, recorder: StepRecorder, q: Tensor, key: Key, shape: list[int]) -> Tensor:
        dim, copies = self.output_axis.dim, q.expand(shape)

        def terms(g: Tensor) -> Terms:
            lead = self.output_axis.lead(g, 1)
            if self.output_axis.merged:
                lead = lead.sum((dim + 2, dim + 3))
            array = lead.reshape(*lead.shape[:2], *q.shape).transpose(0, 1)
            yield key, Block(label(key), tuple(q.shape), array)

        recorder.record(copies, terms)
        return copies


@dataclass(frozen=True)
class ExpandStep(Step):
    """`expand`, `repeat` and functions like them, which give a tracked tensor its samples."""

    output_axis: BatchAxis

    def run(self, recorder: StepRecorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        q = args[0]
        key = recorder.tracked.get(id(q))
        out = self.function(*args, **kwargs)
        axis = self.output_axis
        if key is None or out.shape[axis.dim] != axis.length(recorder.samples):
            recorder.deviated = True
            return out
        sizes = [1] * (out.dim() - q.dim()) + list(q.shape)

        def terms(g: Tensor) -> Terms:
            lead = axis.lead(g, 1)
            first = axis.dim + 2
            mine = lead.flatten(first, first + 1) if axis.merged else lead.unsqueeze(first)
            # Along every dim the output is q's entries, over and over; q may have none.
            pairs = zip(mine.shape[2:], sizes, strict=True)
            split = [n for m, s in pairs for n in (m // max(s, 1), s)]
            copies = [2 * dim + 2 for dim, times in enumerate(split[::2]) if times > 1]
            array = mine.reshape(*mine.shape[:2], *split)
            array = array.sum(copies) if copies else array
            array = array.reshape(*array.shape[:2], *q.shape).transpose(0, 1)
            yield key, Block(label(key), tuple(q.shape), array)

        recorder.record(out, terms)
        return out


@dataclass(frozen=True)
class VmapStep(Step):
    """Any other function, vectorised over samples.

    Its output lies in memory as the function's own does, whose dims, outermost first, are `order`:
    dropout after it draws in that order, and a `view` of it needs it.
    """

    input_axes: tuple[BatchAxis | None, ...]  # of the tensors among the arguments
    output_axis: BatchAxis
    order: tuple[int, ...]

    def run(self, recorder: StepRecorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def record(copies: Tensor, q: Tensor, key: Key) -> None:
            def terms(g: Tensor) -> Terms:
                yield key, Block(label(key), tuple(q.shape), g.transpose(0, 1))

            recorder.record(copies, terms)

        if self._samples(tensors_of((args, kwargs))) != recorder.samples:
            return recorder.deviate(self.function, args, kwargs)
        return self.vectorised(recorder.tracked, args, kwargs, record)

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
                tensors.append(tensor if axis is None else axis.lead(tensor))
                dims.append(None if axis is None else 0)

        def alone(*parts: Tensor) -> Tensor:
            mine = list(leaves)
            for position, axis, part in zip(at, self.input_axes, parts, strict=True):
                mine[position] = part if axis is None else axis.alone(part)
            inner_args, inner_kwargs = tree_unflatten(mine, tree)
            result: Tensor = self.function(*inner_args, **inner_kwargs)
            return self.output_axis.lead(result)[0]

        out: Tensor = torch.vmap(alone, in_dims=tuple(dims))(*tensors)
        places = [self.order.index(dim) for dim in range(len(self.order))]
        return self.output_axis.back(out).permute(self.order).contiguous().permute(places)

    def _samples(self, tensors: list[Tensor]) -> int:
        for tensor, axis in zip(tensors, self.input_axes, strict=True):
            if axis is not None:
                return tensor.shape[axis.dim] // axis.length(1)
        return 0


def broadcast_size(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], q: Tensor
) -> tuple[int, ...] | None:
    """Return the shape to which a function broadcasts its argument `q`, None if it may not."""
    if function is F.scaled_dot_product_attention:
        scores, mask = _scores(*args, **kwargs)
        return scores if q is mask else None
    if function not in POINTWISE:
        return None
    shapes = [x.shape for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _scores(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> tuple[tuple[int, ...], Tensor | None]:
    return (*query.shape[:-1], key.shape[-2]), attn_mask
