"""From the terms of a derived tensor q = h(θ) to the terms of the parameters it is made of.

A transposed weight and an embedding of indices that no sample changes keep their factors. Views of
a parameter, as one expert's weight of many, are written into one array at their places. Whatever
else h is, the array of q is pulled back through it, all samples and outputs in one backward, or
one after the other where an operation of h takes no batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from gradbox_engine.per_sample.gradients import gradients, gradients_in_turn
from gradbox_engine.per_sample.recording.function_calls import Key
from gradbox_engine.per_sample.rules.embedding import lookup
from gradbox_engine.per_sample.rules.rule import Target
from gradbox_engine.torch_private import base_of, looked_up
from gradbox_factors import Block, Outer, Term, Total

_TRANSPOSED = ("TBackward0", "TransposeBackward0")


def parameter_terms(
    derived: Mapping[Key, Tensor],
    terms: Mapping[Key, Sequence[Term]],
    parameters: Mapping[str, Tensor],
    *,
    in_float16: bool,
) -> Iterator[tuple[str, Term]]:
    """Yield (parameter, term) pairs that stand for what `terms` are for the derived tensors."""
    arrays: dict[str, Tensor] = {}  # of parameters of which there are views
    names = {id(parameter): name for name, parameter in parameters.items()}
    for key, found in terms.items():
        q = derived[key]
        name = names.get(id(base_of(q))) if _of_parts(q) else None
        if name is None:
            yield from _pulled_back(q, found, parameters, in_float16=in_float16)
            continue
        B, Y = found[0].samples, found[0].outputs
        base = parameters[name]
        if name not in arrays:
            arrays[name] = base.new_zeros(B, Y, *base.shape, dtype=found[0].dtype)
        size = base.numel()
        strides, at = (Y * size, size, *q.stride()), q.storage_offset() - base.storage_offset()
        part = arrays[name].as_strided((B, Y, *q.shape), strides, at)
        for term in found:
            part += term.block()
    for name, array in arrays.items():
        yield name, Block(name, tuple(array.shape[2:]), array)


def _of_parts(q: Tensor) -> bool:
    """Return whether q is a view of some of a contiguous tensor's entries, each once."""
    base = base_of(q)
    if base is None or not base.is_contiguous() or q.numel() >= base.numel():
        return False
    reach = 0
    for stride, size in sorted(zip(q.stride(), q.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += stride * (size - 1)
    return q.dtype == base.dtype


def _pulled_back(
    q: Tensor, terms: Sequence[Term], parameters: Mapping[str, Tensor], *, in_float16: bool
) -> Iterator[tuple[str, Term]]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    leaf = _leaf(q.grad_fn)
    name = names.get(id(leaf))
    kind = q.grad_fn.name() if q.grad_fn is not None else ""
    if name is not None and leaf is not None and kind in _TRANSPOSED and q.dim() == 2:
        yield from ((name, _turned(term, name, leaf)) for term in terms)
        return
    block = terms[0].block() if len(terms) == 1 else Total(tuple(terms)).block()
    if name is not None and leaf is not None and kind == "EmbeddingBackward0":
        yield name, _looked_up(q.grad_fn, block, Target(name, tuple(leaf.shape), leaf.dtype))
        return
    cotangents, leaves = block.flatten(0, 1), list(parameters.values())
    try:
        found = gradients(
            q, leaves, cotangents, keep_graph=True, in_float16=in_float16, batched=True
        )
    except RuntimeError:  # an operation of h has no batches: one of sparse tensors, say
        found = gradients_in_turn(q, leaves, cotangents, in_float16=in_float16)
    for name, gradient in zip(parameters, found, strict=True):
        if gradient is not None:
            array = gradient.view(*block.shape[:2], *gradient.shape[1:])
            yield name, Block(name, tuple(array.shape[2:]), array)


def _turned(term: Term, name: str, leaf: Tensor) -> Term:
    shape = tuple(leaf.shape)
    if isinstance(term, Outer):
        return replace(term, parameter=name, shape=shape, transposed=not term.transposed)
    return Block(name, shape, term.block().mT)


def _looked_up(node: Any, block: Tensor, weight: Target) -> Term:
    ids, padding_idx = looked_up(node)
    ids = ids.reshape(1, -1).expand(block.shape[0], -1)
    # The node keeps "no padding" as -1, unsigned.
    inside = padding_idx if 0 <= padding_idx < weight.shape[0] else None
    return lookup(ids, block.transpose(0, 1), weight, inside)


def _leaf(node: Any) -> Tensor | None:
    following = [] if node is None else [edge[0] for edge in node.next_functions if edge[0]]
    if len(following) != 1:
        return None
    leaf: Tensor | None = getattr(following[0], "variable", None)
    return leaf
