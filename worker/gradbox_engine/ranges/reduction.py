"""One sum of gradients out of one a range, in a tree that the number of ranges fixes.

    ranges     0   1   2   3   4
                ╲ ╱     ╲ ╱    │
                 +       +     │
                  ╲     ╱      │
                     +         │
                      ╲_______╱
                          +

Floating-point addition is not associative, so which device ends first must not decide what is added
to what: neighbours are, level by level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from gradbox_engine.ranges.protocol import GradientForm, NamedSums

T = TypeVar("T")


def added(left: NamedSums, right: NamedSums) -> NamedSums:
    """Return left + right, by parameter; left's tensors are written to.

    A parameter that one of them does not have was not reached there and is what the other has.
    """
    total = dict(left)
    for name, tensor in right.items():
        total[name] = total[name].add_(tensor) if name in total else tensor
    return total


def split_in_tree(nodes: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Return the two halves that are added last: the first has as many as a power of two."""
    middle = 1 << (len(nodes) - 1).bit_length() - 1
    return nodes[:middle], nodes[middle:]


def completed(
    sums: NamedSums, parameters: Mapping[str, GradientForm], *, device: torch.device
) -> NamedSums:
    """Return sums in the parameters' order, with zeros for those that no range has reached."""
    return {
        name: sums[name]
        if name in sums
        else torch.zeros(form.shape, dtype=form.dtype, device=device)
        for name, form in parameters.items()
    }
