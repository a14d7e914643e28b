"""One tensor as safetensors describes it: dtype, shape, and its own memory as bytes.

Torch tensors (on any device, any layout that is dense) and NumPy arrays are tensors here. Neither
torch nor its absence is assumed: a torch tensor can only exist where torch has been imported.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from gradbox.errors import InvalidInputs

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"

# Names of dtypes, as torch and NumPy (with ml_dtypes) both spell them, and what safetensors says.
DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
# What to do about something that is no tensor.
CONVERT: Final = "convert it with torch.as_tensor, or ask the tokenizer for return_tensors='pt'"
TOKENISE: Final = (
    "tokenise texts first: a shard is tokenizer(texts, padding=True, return_tensors='pt')"
)
ADVICE: Final[Mapping[type, str]] = {
    str: TOKENISE,
    NoneType: "leave it out: the model then takes its own default",
    bool: "options of a model are set where it is registered, as in models.toml's "
    "kwargs = {output_hidden_states = true}",
}
FLOATING: Final = frozenset({"F64", "F32", "F16", "BF16"})


def is_tensor(value: object) -> bool:
    """Tell whether `value` is a torch tensor or a NumPy array (or NumPy scalar)."""
    return isinstance(value, np.ndarray | np.generic) or _is_torch(value)


def is_torch_importable() -> bool:
    """Tell whether torch is loaded or can be, without loading it."""
    from importlib.util import find_spec

    if "torch" in sys.modules:
        return sys.modules["torch"] is not None
    return find_spec("torch") is not None


@dataclass(frozen=True, eq=False)
class TensorBytes:
    """One tensor as safetensors describes it; its bytes are read when they are asked for."""

    source: Any
    dtype: str  # safetensors' tag, such as BF16
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def is_floating(self) -> bool:
        """Whether the tensor holds real floating-point numbers, and so can have a gradient."""
        return self.dtype in FLOATING

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.item_bytes

    def view(self) -> memoryview:
        """Return the bytes in row-major, little-endian order.

        They are the tensor's own memory where that is possible: not if it is on another device, is
        strided, or is big-endian.
        """
        if _is_torch(self.source):
            return bytes_in_order(self.source)
        array = np.ascontiguousarray(self.source)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        return array.reshape(-1).view(np.uint8).data


def tensor_bytes(value: object, *, where: str) -> TensorBytes:
    """Describe a tensor.

    Args:
        where: what an error calls it, such as "shard 3 of group 'z', argument 'input_ids'".

    Raises:
        InvalidInputs: it is not a tensor, or one whose dtype or layout safetensors cannot hold.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidInputs(
            f"{where}: expected an array without a mask, got a masked one: fill it, by "
            f".filled(0), and give the mask as an argument of its own"
        )
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind == "U":
            raise InvalidInputs(f"{where}: expected numbers, got {what_came(array.tolist())}")
        return _described(array, dtype=array.dtype.name, shape=array.shape, where=where)
    if not _is_torch(value):
        raise InvalidInputs(
            f"{where}: expected a torch tensor or a NumPy array, got {what_came(value)}"
        )
    tensor: torch.Tensor = value  # type: ignore[assignment]  # `_is_torch` said so
    _refuse_transformed(tensor, where)
    layout = str(tensor.layout).removeprefix("torch.")
    if layout != "strided" or tensor.is_nested or tensor.device.type == "meta":
        got = f"layout {layout}; call .to_dense() on a sparse one"
        if tensor.device.type == "meta":
            got = "one on the meta device, which holds none; make it on another device"
        elif tensor.is_nested:
            got = "a nested one; call .to_padded_tensor(0)"
        raise InvalidInputs(f"{where}: expected a dense tensor that holds values, got {got}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _described(tensor, dtype=dtype, shape=tuple(tensor.shape), where=where)


def _refuse_transformed(tensor: torch.Tensor, where: str) -> None:
    import torch

    kinds = torch._C._functorch
    if kinds.is_functorch_wrapped_tensor(tensor) or kinds.is_legacy_batchedtensor(tensor):
        raise InvalidInputs(
            f"{where}: expected a tensor that holds values, got one of a function under vmap, "
            f"grad, vjp or the like of torch.func, which cannot reach through a network: submit "
            f"the job outside, with all samples; PerSampleGradient and Jacobian give a row for "
            f"each, and torch.autograd.grad without is_grads_batched is called once for each"
        )


def _described(source: Any, *, dtype: str, shape: tuple[int, ...], where: str) -> TensorBytes:
    if dtype not in DTYPES:
        raise InvalidInputs(
            f"{where}: expected a dtype that safetensors holds ({', '.join(DTYPES)}), got {dtype}; "
            f"convert it"
        )
    tag, item_bytes = DTYPES[dtype]
    return TensorBytes(source=source, dtype=tag, shape=shape, item_bytes=item_bytes)


def bytes_in_order(tensor: torch.Tensor) -> memoryview:
    """Return a torch tensor's bytes in row-major order, as a safetensors file has them.

    Of one that lies so on the CPU they are its own memory.
    """
    import torch

    whole = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Not `reshape`: shape (1,) or (0,) may have any stride, which bytes cannot have.
    flat = whole.as_strided((whole.numel(),), (1,))
    # By way of uint8, because NumPy knows neither bfloat16 nor fp8.
    return flat.view(torch.uint8).numpy().data


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def what_came(value: object) -> str:
    """Describe what is no tensor, and say what to do about it."""
    first = value[0] if isinstance(value, list) and value else value
    advice = next((text for kind, text in ADVICE.items() if isinstance(first, kind)), CONVERT)
    if value is None:
        return f"None; {advice}"
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'…' if len(text) > 60 else ''}; {advice}"
