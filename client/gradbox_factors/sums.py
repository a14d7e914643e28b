"""Sums over parameters: their dtype, and tensors to begin with; pieces put together."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gradbox_factors.term import Term


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, in the widest of their dtypes."""
    total = parts[0].to(_widest(part.dtype for part in parts), copy=True)
    for part in parts[1:]:
        total += part
    return total


def total_of(parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum in a dtype that is as wide as each part's, one part at a time."""
    first, *others = parts
    total = first.to(dtype, copy=True)
    for part in others:
        total += part
    return total


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return `parts` as one tensor; the only one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def any_term(piece: Mapping[str, Term]) -> Term:
    return next(iter(piece.values()))


def common_dtype(terms: Mapping[str, Term]) -> torch.dtype:
    """Return the dtype of what is summed over parameters: their widest, and float32 at least."""
    return _widest({term.dtype for term in terms.values()})


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def zeros_beside(term: Term, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    device = next(iter(term.tensors().values())).device
    return torch.zeros(sizes, dtype=dtype, device=device)
