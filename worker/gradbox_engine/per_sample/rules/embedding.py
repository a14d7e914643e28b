"""Embeddings, and tables read by index: rows are zero but for the table rows that indices name.

Shapes: B samples, Y outputs, T positions, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradbox_engine.errors import CoupledSamples
from gradbox_engine.per_sample.rules.rule import Layer, Rule, Target, Targets
from gradbox_factors import Lookup, Term


def _bind_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Layer | None:
    if scale_grad_by_freq:
        raise CoupledSamples(
            "an embedding divides its gradient by how often an index occurs in the whole batch "
            "(scale_grad_by_freq=True), so a sample has no gradient of its own: build the "
            "embedding with scale_grad_by_freq=False"
        )
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return Layer(input, {"weight": weight}, detail=padding_idx, first_dims=input.dim())


def _bind_look_up(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Layer | None:
    inside = padding_idx if padding_idx >= 0 else None  # a negative one stands for none here
    return _bind_embedding(indices, weight, inside, scale_grad_by_freq=scale_grad_by_freq)


def _bind_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    *_: Any,
    **__: Any,
) -> Layer | None:
    _bind_embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq)
    return None


def _bind_index(table: Tensor, index: Any) -> Layer | None:
    of_rows = isinstance(index, Tensor) and index.dtype == torch.int64 and index.dim() > 0
    if not of_rows or table.dim() != 2:
        return None
    return Layer(index, {"weight": table}, first_dims=index.dim())


def _counted_from_zero(layer: Layer) -> Tensor:
    table = layer.parameters["weight"]
    assert table is not None
    return layer.input.remainder(len(table))


def lookup(ids: Tensor, g: Tensor, weight: Target, padding_idx: int | None) -> Lookup:
    """Return the term of an embedding: ids (B, ...) and g (Y, B, ..., D)."""
    ids_BT = ids.reshape(ids.shape[0], -1)
    left = g.reshape(g.shape[0], ids_BT.shape[0], ids_BT.shape[1], g.shape[-1])
    if padding_idx is not None and bool((ids_BT == padding_idx).any()):
        left = left * (ids_BT != padding_idx)[..., None]
    return Lookup(weight.name, weight.shape, left, ids_BT)


def _embedding_terms(layer: Layer, x: Tensor, g: Tensor, targets: Targets) -> Iterator[Term]:
    yield lookup(x, g, targets["weight"], layer.detail)


RULES: dict[Callable[..., Any], Rule] = {
    F.embedding: Rule("embedding", _bind_embedding, _embedding_terms),
    torch.embedding: Rule("embedding", _bind_look_up, _embedding_terms),
    F.embedding_bag: Rule("embedding", _bind_bag, _embedding_terms),  # which only refuses
    Tensor.__getitem__: Rule("index", _bind_index, _embedding_terms, _counted_from_zero),
}
