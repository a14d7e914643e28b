"""A blob: one safetensors file that is never assembled, uploaded under the digest of its bytes.

The file is 8 bytes of header length (little-endian), the header (JSON, padded with spaces to a
multiple of 8), then the tensors' bytes without gaps. `Blob` keeps the header and reads each
tensor's own memory when its digest is computed and again when it is sent. Tensors are ordered by
item size (largest first) and then by name, so each begins at a multiple of its item size, and equal
tensors under equal names give an equal digest.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final

from gradbox.tensors.safetensors_header import SafetensorsHeader, TensorEntry
from gradbox.tensors.tensor_bytes import TensorBytes

CHUNK_BYTES: Final = 4 * 2**20
# Smaller tensors are gathered before they are sent: a write to a socket costs more than the copy.
GATHER_BYTES: Final = 64 * 2**10


class Blob:
    """One safetensors file, to be uploaded under its digest.

    `is_new` tells that the box will hardly have it, so that nobody need ask.

    Attributes:
        tensors: by name, in the order of the file.
        header: what a reader of the file finds in its header.
    """

    def __init__(self, tensors: Mapping[str, TensorBytes], *, is_new: bool = False) -> None:
        self.is_new = is_new
        ordered = sorted(tensors.items(), key=lambda item: (-item[1].item_bytes, item[0]))
        self.tensors = dict(ordered)
        entries, stated, offset = dict[str, TensorEntry](), dict[str, Any](), 0
        for name, tensor in ordered:
            end = offset + tensor.size_bytes
            entries[name] = TensorEntry(tensor.dtype, tensor.shape, offset, end)
            stated[name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(stated, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._head = struct.pack("<Q", len(text)) + text
        self.header = SafetensorsHeader(entries, {}, data_start=len(self._head))
        self.size_bytes = len(self._head) + offset

    def __repr__(self) -> str:
        return f"Blob({len(self.tensors)} tensors, {self.size_bytes} bytes)"

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the file's bytes when it was first asked for, in lower-case hex."""
        return self._sha256()

    @property
    def is_unchanged(self) -> bool:
        """Whether the tensors still have the numbers that they had then."""
        return self._sha256() == self.digest

    def _sha256(self) -> str:
        sha = hashlib.sha256(self._head)
        for tensor in self.tensors.values():
            sha.update(tensor.view())
        return sha.hexdigest()

    def chunks(self) -> Iterator[memoryview]:
        """Give the file's bytes in pieces of at most `CHUNK_BYTES`; can be begun again."""
        gathered = bytearray(self._head)
        for tensor in self.tensors.values():
            if tensor.size_bytes < GATHER_BYTES:
                gathered += tensor.view()
                if len(gathered) < CHUNK_BYTES - GATHER_BYTES:
                    continue
            yield from _pieces(memoryview(gathered))
            gathered = bytearray()
            if tensor.size_bytes >= GATHER_BYTES:
                yield from _pieces(tensor.view())
        yield from _pieces(memoryview(gathered))


def _pieces(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]
