"""Parameters rounded to 16 bits on their way to the box, which widens them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from gradbox.protocol.options import Transfer

FORMATS: Final[Mapping[Transfer, torch.dtype]] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def rounded_weights(
    weights: Mapping[str, Any], parameters: Collection[str], *, transfer: Transfer
) -> Mapping[str, Any]:
    """Return the weights as they are sent.

    What is no parameter stays as it is, and so does one with a number that the format does not
    hold: none becomes infinite.
    """
    if transfer == "exact":
        return weights
    return {
        name: _rounded(torch.as_tensor(value), FORMATS[transfer]) if name in parameters else value
        for name, value in weights.items()
    }


def _rounded(weight: Tensor, form: torch.dtype) -> Tensor:
    if not weight.is_floating_point() or weight.dtype.itemsize <= 2:
        return weight
    rounded = weight.detach().to(form)
    overflows = rounded.isinf() & weight.detach().isfinite()
    return weight if bool(overflows.any()) else rounded
