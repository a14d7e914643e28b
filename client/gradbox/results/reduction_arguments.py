"""What a user hands to `jvp`, `vjp` and `projection` of a result, read or refused.

Shapes: B samples, Y outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from gradbox.errors import InvalidInputs, InvalidJob
from gradbox.protocol.per_sample import ProjectionKind
from gradbox.tensors.tensor_bytes import is_tensor

if TYPE_CHECKING:
    import torch

    from gradbox_factors import Factored


def read_tangents(tangents: Any, rows: Factored) -> dict[str, torch.Tensor]:
    """Return tangents by parameter name as torch tensors.

    Raises:
        InvalidInputs: they are no dict of real tensors, or a name or a shape is not a parameter's.
    """
    if not isinstance(tangents, Mapping):
        raise InvalidInputs(
            f"tangents: expected {{parameter: tensor}}, got {type(tangents).__name__}"
        )
    read = {name: _real(given, f"tangents[{name!r}]") for name, given in tangents.items()}
    for name, tangent in read.items():
        expected = rows.pieces[0][name].shape if name in rows.names else None
        if expected is None or tuple(tangent.shape) != expected:
            wanted = expected or f"a parameter of this result ({len(rows.names)})"
            raise InvalidInputs(
                f"tangents[{name!r}]: expected {wanted}, got {tuple(tangent.shape)}"
            )
    return read


def read_cotangents(given: Any, rows: Factored, *, one_output: bool) -> torch.Tensor:
    """Return cotangents as a torch tensor of shape (B, Y).

    Raises:
        InvalidInputs: they are no real tensor of shape (B,), (B, Y) or z's.
    """
    cotangents = _real(given, "cotangents")
    expected = (rows.samples, rows.outputs)
    if cotangents.shape[:1] != expected[:1] or cotangents.numel() != expected[0] * expected[1]:
        shape = expected[:1] if one_output else expected
        raise InvalidInputs(
            f"cotangents: expected {shape}, or z's shape, got {tuple(cotangents.shape)}"
        )
    return cotangents.reshape(expected)


def check_projection(dim: Any, seed: Any, kind: Any) -> None:
    """Refuse a projection that the box would refuse too.

    Raises:
        InvalidJob: `dim` or `seed` is no whole number in range, or `kind` names no matrix.
    """
    if not _is_whole(dim) or dim < 1:
        raise InvalidJob(f"dim: expected a whole number from 1, got {dim!r}")
    if not _is_whole(seed) or not 0 <= seed < 2**63:
        raise InvalidJob(f"seed: expected a whole number from 0 to 2⁶³ − 1, got {seed!r}")
    if kind not in get_args(ProjectionKind):
        raise InvalidJob(f"kind: expected one of {get_args(ProjectionKind)}, got {kind!r}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _real(value: Any, where: str) -> torch.Tensor:
    import torch

    if not is_tensor(value):
        raise InvalidInputs(
            f"{where}: expected a torch tensor or a NumPy array, got {type(value).__name__}; "
            f"convert it with torch.as_tensor"
        )
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind not in "fiub":
            raise InvalidInputs(f"{where}: expected real numbers, got {array.dtype}")
        # A copy that torch can hold: in this machine's byte order, with strides of 0 or more.
        value = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    if value.is_complex():
        raise InvalidInputs(f"{where}: expected real numbers, got {value.dtype}")
    tensor: torch.Tensor = value.detach()
    return tensor
