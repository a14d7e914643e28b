"""Writing a result: a safetensors file, streamed to disk and hashed on the way.

`safetensors.torch.save_file` would need a second pass for the digest, and all tensors on the CPU at
once; here one tensor at a time leaves the device.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from gradbox.errors import InvalidInputs
from gradbox.protocol import ResultView
from gradbox_service.store.files import make_folder, put_in_place
from gradbox_worker.safetensors_types import SAFETENSORS_NAMES

ALIGNMENT_BYTES: Final = 8
LENGTH_BYTES: Final = 8


def write_result(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]
) -> ResultView:
    """Write `path` so that it is there whole or not at all, and return its size and digest.

    Raises:
        InvalidInputs: a tensor's dtype has no place in a safetensors file.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS_NAMES:
            raise InvalidInputs(
                f"expected results that safetensors can hold, got {name!r} of {tensor.dtype}; "
                f"leave it out with wrt, or register the model with another dtype"
            )
    # Widest dtype first, so that every tensor begins at a multiple of its item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    beside = path.with_suffix(".partial")  # as ResultStore names it, which discards it
    digest = hashlib.sha256()
    make_folder(path.parent)
    try:
        with beside.open("wb") as file:
            for piece in _pieces(names, tensors, metadata):
                digest.update(piece)
                file.write(piece)
            size_bytes = file.tell()
            file.flush()
            os.fsync(file.fileno())
        put_in_place(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return ResultView(size_bytes=size_bytes, sha256=digest.hexdigest())


def _pieces(
    names: Sequence[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    yield len(text).to_bytes(LENGTH_BYTES, "little") + text
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data
