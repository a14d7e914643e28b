"""A model's version: the SHA-256 over its architecture and its weights.

Architecture: for every module in order its path, the class's qualified name, `extra_repr`, and its
plain public attributes (numbers, strings, functions by name), since much that shapes a forward
stands in no `extra_repr`, the number of attention heads for one; and a transformers `config`. The
code of a forward is not seen, except a `python` model's file, which the caller passes as `code`.

Weights: for every parameter and buffer, non-persistent ones included, its name, dtype, shape and
bytes; of one that is made of others, those of each. The bytes of a tied tensor count once; its
further names point to the first.

The same model gives the same version in every process and on every device. Cost: one pass over the
weights, about 1 GB/s.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from gradbox.tensors.tensor_bytes import bytes_in_order
from gradbox_engine.model.tensor_equality import strided_parts
from gradbox_engine.torch_private import is_traceable_wrapper_subclass

ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")
# What names the module of a `python` model's file: where it lies is no part of what it is.
OF_A_FILE: Final = re.compile(r"gradbox_models_[0-9a-f]{12}_")
CHUNK_BYTES: Final = 64 * 2**20
# `training` belongs to a job; the others say where a model came from, not what it is.
NOT_ARCHITECTURE: Final = frozenset(
    {"training", "name_or_path", "_name_or_path", "transformers_version"}
)


def model_version(model: nn.Module, *, code: str = "") -> str:
    """Return the version as 64 hexadecimal digits.

    Args:
        code: what else defines the forward, such as the digest of the file it is written in.

    Raises:
        TypeError: a parameter or buffer is sparse or quantized, so that it has no plain bytes.
    """
    digest = hashlib.sha256()
    for line in (f"code {code}", *architecture(model)):
        digest.update(OF_A_FILE.sub("gradbox_models_", line).encode() + b"\n")
    _add_weights(digest, model)
    return digest.hexdigest()


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 over the weights alone, whatever code and packages they belong to.

    Raises:
        TypeError: as for `model_version`.
    """
    digest = hashlib.sha256()
    _add_weights(digest, model)
    return digest.hexdigest()


def _add_weights(digest: hashlib._Hash, model: nn.Module) -> None:
    names: dict[int, str] = {}
    for kind, name, tensor in _tensors(model):
        first = names.setdefault(id(tensor), name)
        if first != name:
            digest.update(f"{kind} {name} = {first}\n".encode())
            continue
        digest.update(f"{kind} {name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        for piece in _bytes(name, tensor):
            digest.update(piece)


def architecture(model: nn.Module) -> Iterator[str]:
    """Give lines that say what a model is without its weights."""
    configs: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        cls = type(module)
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "to_dict") and id(config) not in configs:
            configs.add(id(config))
            yield f"config {path} {_canonical(config.to_dict())}"
        facts = [
            f"{key}={text}"
            for key, value in sorted(vars(module).items())
            if not key.startswith("_") and key not in NOT_ARCHITECTURE
            if (text := _plain(value)) is not None
        ]
        shown = ADDRESS.sub("", module.extra_repr())
        yield f"module {path} {cls.__module__}.{cls.__qualname__}({shown}) {'; '.join(facts)}"


def _canonical(config: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in config.items() if key not in NOT_ARCHITECTURE}
    return ADDRESS.sub("", json.dumps(kept, sort_keys=True, default=str))


def _plain(value: Any) -> str | None:
    """Write an attribute the same way in each process, or None for what cannot be."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return None if None in parts else f"[{', '.join(part or '' for part in parts)}]"
    if inspect.isroutine(value) and not isinstance(value, types.MethodType):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    return None


def _tensors(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield "parameter", name, parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield "buffer", name, buffer


def _bytes(name: str, tensor: torch.Tensor) -> Iterator[bytes | memoryview]:
    if is_traceable_wrapper_subclass(tensor):  # a quantised one of torchao's, say
        kind, (_, context) = type(tensor), tensor.__tensor_flatten__()
        told = f"{kind.__module__}.{kind.__qualname__} {ADDRESS.sub('', repr(context))}\n"
        yield told.encode()
        for part in strided_parts(tensor.detach()):
            yield from _bytes(name, part)
        return
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(
            f"{name}: expected a dense tensor with bytes of its own, got layout {tensor.layout} on "
            f"{tensor.device}; register the model with dense weights"
        )
    data = bytes_in_order(tensor)
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]
