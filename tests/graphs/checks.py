"""Functions with checks, and with what looks like one. pytest would rewrite a test's asserts."""

from __future__ import annotations

import torch
from torch import Tensor


def rank(z: Tensor) -> Tensor:
    if z.dim() != 2:
        raise ValueError(f"expected a matrix, got {z.shape}")
    return z.sum()


def not_all_positive(z: Tensor) -> Tensor:
    if not (z > 0).all():
        raise ValueError
    return z.log().sum() / z.dim()


def either(z: Tensor) -> Tensor:
    if z.dim() != 2 or z.shape[0] < 1 or z.dtype == torch.float16:
        raise ValueError("expected a matrix with rows")
    return z.sum()


def both(z: Tensor) -> Tensor:
    assert z.dim() == 2 and z.shape[1] == 3, "expected three columns"  # noqa: PT018
    return z.sum()


def raise_behind(z: Tensor) -> Tensor:
    if z.dim() == 2:
        return z.sum()
    raise ValueError("expected a matrix")


def length(z: Tensor) -> Tensor:
    if len(z.shape) != 2:
        raise ValueError("expected a matrix")
    return z.sum() / len(z)


def tensor(z: Tensor) -> Tensor:
    rows = z.sum(-1)
    if not isinstance(rows, Tensor):
        raise TypeError(f"expected a tensor, got {type(rows)}")
    if not torch.is_tensor(rows) or rows.dim() != 1:
        raise TypeError("expected a vector")
    return rows.sum()


def argument(z: Tensor) -> Tensor:
    if isinstance(z, list):
        z = torch.stack(z)
    return z.sum() if isinstance(z, Tensor) and torch.is_tensor(z) and rank(z) is not None else z


def between(z: Tensor) -> Tensor:
    assert 1 <= z.dim() < 3, f"expected a vector or a matrix, got {z.dim()}"
    if not 0 < z.shape[0] <= 4 or not 2 < z.shape[-1] <= 3 <= z.shape[1]:
        raise ValueError("expected three columns")
    return z.sum()


def sizes(z: Tensor) -> Tensor:
    num, width = z.shape[0], z.shape[-1]
    if (num, width, z.dim()) != (z.size(0), 3, 2):
        raise ValueError("expected three columns")
    assert (z.dim(), width) == (2, 3), "expected three columns"
    return z.sum()


CHECKS = [
    sizes,
    between,
    rank,
    not_all_positive,
    either,
    both,
    raise_behind,
    length,
    tensor,
    argument,
]


def another_value(z: Tensor) -> Tensor:
    if z.dim() != 2:
        z = z[0]
    return z.sum()


def both_raise(z: Tensor) -> Tensor:
    if z.dim() != 2:
        raise ValueError("expected a matrix")
    raise TypeError("expected something else")


def any_of(z: Tensor) -> Tensor:
    if any([z.dim() != 2, z.shape[0] < 1]):
        raise ValueError("expected a matrix")
    return z.sum()


def only_if_both(z: Tensor) -> Tensor:
    if z.dim() != 2 and z.dim() != 3:
        raise ValueError("expected a matrix or a batch of them")
    return z.sum()


def outside(z: Tensor) -> Tensor:
    if 2 < z.dim() < 9:
        raise ValueError("expected a matrix")
    return z.sum()


def listed(z: Tensor) -> Tensor:
    if z.dim() not in (2, 3):
        raise ValueError("expected a matrix or a batch of them")
    return z.sum()


def no_list(z: Tensor) -> Tensor:
    if isinstance(z.shape, list):
        raise TypeError("expected no list")
    return z.sum()


def other_way(z: Tensor) -> Tensor:
    rows = z.sum(1)
    return rows.sum() if isinstance(rows, Tensor) else rows


def by_dtype(z: Tensor) -> Tensor:
    return z.sum() if isinstance(z, torch.DoubleTensor) else z.mean()


def by_class(z: Tensor) -> Tensor:
    return z.sum() if isinstance(z, torch.nn.Parameter | None) else z.mean()


NO_CHECKS = [
    by_dtype,
    by_class,
    another_value,
    both_raise,
    any_of,
    only_if_both,
    outside,
    listed,
    no_list,
    other_way,
]
