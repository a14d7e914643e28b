"""Writing a result: a safetensors file, hashed on its way to disk, or to memory if it is small.

`safetensors.torch.save_file` would need a second pass for the digest, and all tensors on the CPU at
once; here one tensor at a time leaves the device. Its last tensor are the `checksums` of the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from gradbox.errors import InvalidInputs
from gradbox.protocol import ResultView
from gradbox.results.result_files import HeldTensors
from gradbox.tensors.checksums import NAME as CHECKSUMS
from gradbox.tensors.checksums import Checksums, shape_for
from gradbox.tensors.tensor_bytes import bytes_in_order
from gradbox_service.store.files import make_folder
from gradbox_service.store.room import Room
from gradbox_worker.files.safetensors_types import SAFETENSORS_NAMES

ALIGNMENT_BYTES: Final = 8
LENGTH_BYTES: Final = 8
# A smaller tensor is hashed sooner than a thread is told to.
HASHED_BESIDE_BYTES: Final = 2**20
RESULT: Final = "the result"


@dataclass(frozen=True)
class Written:
    """A result that was written: what is said of it, and what it holds where no file has it."""

    view: ResultView
    content: bytes | None = None
    tensors: HeldTensors | None = None


def write_result(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str],
    room: Room,
    small_bytes: int = 0,
) -> Written:
    """Write `path` so that it is there whole or not at all, and return its size and digest.

    A power cut it may not outlive: it is then missing or cut short, and the box says so. A result
    can be computed again.

    Args:
        small_bytes: a result of fewer bytes gets no file.

    Raises:
        InvalidInputs: a tensor's dtype has no place in a safetensors file.
        StorageFull: the disk does not hold it.
    """
    # Widest dtype first, so that every tensor begins at a multiple of its item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries = laid_out({name: (tensors[name].shape, tensors[name].dtype) for name in names})
    data_bytes = sum(tensor.nbytes for tensor in tensors.values())
    entries |= laid_out({CHECKSUMS: (shape_for(data_bytes), torch.uint8)}, at=data_bytes)
    header = header_bytes(entries, metadata)
    if len(header) + entries[CHECKSUMS]["data_offsets"][1] < small_bytes:
        buffer = BytesIO()
        view = _written(buffer, header, [tensors[name] for name in names])
        return Written(view, buffer.getvalue())
    partial = path.with_suffix(".partial")  # as ResultStore names it, which discards it
    room.check(data_bytes, what=RESULT)
    make_folder(path.parent)
    try:
        with room.noticing_a_full_disk(what=RESULT), open(partial, "wb") as file:
            view = _written(file, header, [tensors[name] for name in names])
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return Written(view)


def _written(file: BinaryIO, header: bytes, tensors: Iterable[Tensor]) -> ResultView:
    digests = FileDigests(header)
    file.write(header)
    for tensor in tensors:
        piece = bytes_in_order(tensor)
        with digests.of(piece):
            file.write(piece)
    file.write(digests.finish())
    return ResultView(size_bytes=file.tell(), sha256=digests.sha256.hexdigest())


@cache
def _beside() -> ThreadPoolExecutor:
    """Return the two threads of this process in which large pieces are hashed."""
    return ThreadPoolExecutor(2, "digest")


class FileDigests:
    """The SHA-256 of a file that is written or read in order, and the checksums that end it."""

    def __init__(self, header: bytes) -> None:
        self.sha256 = hashlib.sha256(header)
        self._checksums = Checksums(header)

    @contextmanager
    def of(self, piece: bytes | memoryview) -> Iterator[None]:
        """Add the next piece; a large one beside what is done meanwhile."""
        if len(piece) < HASHED_BESIDE_BYTES:
            self.sha256.update(piece)
            self._checksums.update(piece)
            yield
            return
        both = [_beside().submit(to.update, piece) for to in (self.sha256, self._checksums)]
        try:
            yield
        finally:
            for added in both:
                added.result()

    def finish(self) -> bytes:
        """Return the bytes of the tensor `checksums`, with which the file ends."""
        stored = self._checksums.finish()
        self.sha256.update(stored)
        return stored


def laid_out(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], *, at: int = 0
) -> dict[str, dict[str, Any]]:
    """Return the header's entries of tensors that lie one after the other.

    Args:
        tensors: name → shape and dtype.
        at: where the first one begins, in bytes behind the header.

    Raises:
        InvalidInputs: safetensors has no name for a tensor's dtype.
    """
    entries = {}
    for name, (shape, dtype) in tensors.items():
        if dtype not in SAFETENSORS_NAMES:
            raise InvalidInputs(
                f"expected results that safetensors can hold, got {name!r} of {dtype}; leave it "
                f"out with wrt, or register the model with another dtype"
            )
        start, at = at, at + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, at],
        }
    return entries


def header_bytes(
    entries: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str], *, at_least: int = 0
) -> bytes:
    """Return the file's beginning: the header's length, the header, and spaces.

    Args:
        at_least: how many bytes the header takes at least.
    """
    document = {"__metadata__": dict(metadata), **entries}
    text = json.dumps(document, separators=(",", ":")).encode()
    text = text.ljust(max(at_least, -(-len(text) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES))
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
