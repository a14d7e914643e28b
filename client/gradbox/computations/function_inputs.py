"""What a traced function reads beside the model's outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from gradbox.errors import InvalidInputs
from gradbox.inputs.uploads import Uploads
from gradbox.protocol import TensorRef
from gradbox.protocol.spec_fields import Scalar
from gradbox.tensors.tensor_bytes import is_tensor

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


def split_tensors_and_scalars(
    given: Mapping[str, Any], *, what: str
) -> tuple[dict[str, Any], dict[str, Scalar]]:
    """Part tensors, which are uploaded, from plain values, which become part of the function.

    Raises:
        InvalidInputs: a value is neither, or a name cannot be an argument's.
    """
    if not isinstance(given, Mapping):
        raise InvalidInputs(
            f"{what}: expected {{name: tensor or number}}, the names being arguments of the "
            f"function, got {type(given).__name__}"
        )
    scalars: dict[str, Scalar] = {}
    tensors: dict[str, Any] = {}
    for name, given_value in given.items():
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            raise InvalidInputs(
                f"{what}: expected names of arguments, up to 100 of a-z, A-Z, 0-9 and _, got "
                f"{name!r:.120}"
            )
        value = given_value.item() if isinstance(given_value, np.generic) else given_value
        if value is None or isinstance(value, bool | int | float | str):
            scalars[name] = value
        elif is_tensor(value):
            tensors[name] = value
        else:
            raise InvalidInputs(
                f"{what}[{name!r}]: expected a tensor, a NumPy array, a number, a string or None, "
                f"got {type(given_value).__name__}; convert it with torch.as_tensor"
            )
    return tensors, scalars


def uploaded(tensors: Mapping[str, Any], uploads: Uploads, *, where: str) -> dict[str, TensorRef]:
    """Upload tensors and return references to them, which say what requires grad.

    Args:
        where: as for `Uploads.named`.
    """
    return {
        name: ref.model_copy(
            update={"requires_grad": bool(getattr(tensors[name], "requires_grad", False))}
        )
        for name, ref in uploads.named(tensors, where=where).items()
    }
