"""The names of a result's tensors: SECTION/NAME."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from gradbox_engine.replay.input_gradients import InputGrads
from gradbox_engine.requests import Z

GRADS: Final = "grads"


def section(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put tensors into a section of the result."""
    return {f"{name}/{key}": tensor for key, tensor in tensors.items()}


def by_group(groups: Mapping[str, Z]) -> dict[str, Tensor]:
    """Name each group's tensor GROUP, or each of several GROUP/NAME."""
    flat: dict[str, Tensor] = {}
    for group, z in groups.items():
        flat |= {group: z} if isinstance(z, Tensor) else {f"{group}/{n}": t for n, t in z.items()}
    return flat


def input_gradients(found: InputGrads | None) -> dict[str, Tensor]:
    """Name each shard's gradient GROUP/SHARD/ARGUMENT."""
    return {
        f"{group}/{shard}/{name}": gradient
        for group, named in (found or {}).items()
        for name, gradients in named.items()
        for shard, gradient in enumerate(gradients)
    }
