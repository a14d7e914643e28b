"""What a rule is: how one function's parameters get their factors.

A rule has two halves. `bind` reads a call's arguments and says which of them are parameters (None:
no rule for this call); `terms` makes the factors from the layer's input x (B, ...) and the gradient
at its output g (Y, B, ...), samples leading.

Shapes: B samples, Y outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradbox_factors import Term


@dataclass(frozen=True)
class Layer:
    """One call of a function that has a rule.

    Args:
        input: what the parameters act on.
        parameters: role → tensor, of those that may be parameters.
        detail: what `terms` needs besides them.
        first_dims: how many leading dims of `input` may hold the samples.
    """

    input: Tensor
    parameters: Mapping[str, Tensor | None]
    detail: Any = None
    first_dims: int = 1


@dataclass(frozen=True)
class Target:
    """The parameter that a role stands for."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


Targets = Mapping[str, Target]


@dataclass(frozen=True)
class Rule:
    """How one function's parameters get their factors."""

    name: str
    bind: Callable[..., Layer | None]
    terms: Callable[[Layer, Tensor, Tensor, Targets], Iterator[Term]]
    prepare: Callable[[Layer], Tensor] = field(default=lambda layer: layer.input.detach())
