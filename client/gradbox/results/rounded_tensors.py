"""Gradients that lie in a result file in 16 bits, given back in the dtype that they had on the box.

The file's metadata names them: {tensor: dtype before it was rounded}. docs/wire.md, "Gradients in
16 bits", states the form. Where there is no torch, bfloat16 is read from its bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gradbox.errors import ProtocolError

if TYPE_CHECKING:
    import torch

ROUNDED: Final = "gradbox_rounded"
WIDER: Final[Mapping[str, str]] = {"F32": "float32", "F64": "float64"}


def rounded_tensors(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Return the names of the tensors that were rounded, with the dtypes to give them back in.

    Raises:
        ProtocolError: the metadata's entry is not what docs/wire.md states.
    """
    text = metadata.get(ROUNDED)
    if text is None:
        return {}
    try:
        found = json.loads(text)
        return {str(name): WIDER[tag] for name, tag in found.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ProtocolError(
            f"expected rounded tensors with one of the dtypes {', '.join(WIDER)}, got "
            f"{text[:100]!r} ({type(error).__name__}: {error}); install a newer gradbox"
        ) from None


def widened(tensor: torch.Tensor | np.ndarray[Any, Any], dtype: str) -> Any:
    """Return a copy in a wider dtype, as torch and NumPy both spell it."""
    if isinstance(tensor, np.ndarray):
        return tensor.astype(dtype)
    import torch

    return tensor.to(getattr(torch, dtype))


def bfloat16_array(
    data: bytes | bytearray | memoryview, shape: tuple[int, ...], dtype: str
) -> np.ndarray[Any, Any]:
    """Return bfloat16 numbers in a wider dtype: their bits are the upper half of float32's."""
    upper = np.frombuffer(data, dtype="<u2").astype(np.uint32) << np.uint32(16)
    return upper.view(np.float32).astype(dtype, copy=False).reshape(shape)
