"""What a traced function reads beside the model's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradbox.errors import InvalidInputs
from gradbox.protocol.spec_fields import Scalar
from gradbox.tensors.tensor_bytes import is_tensor


def split_tensors_and_scalars(
    given: Mapping[str, Any], *, what: str
) -> tuple[dict[str, Any], dict[str, Scalar]]:
    """Part tensors, which are uploaded, from plain values, which become part of the function.

    Raises:
        InvalidInputs: a value is neither.
    """
    scalars: dict[str, Scalar] = {}
    tensors: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, np.generic):
            scalars[name] = value.item()
        elif value is None or isinstance(value, bool | int | float | str):
            scalars[name] = value
        elif is_tensor(value):
            tensors[name] = value
        else:
            raise InvalidInputs(
                f"{what}[{name!r}]: expected a tensor, a NumPy array, a number, a string or None, "
                f"got {type(value).__name__}; convert it with torch.as_tensor"
            )
    return tensors, scalars
