"""A safetensors file that states its own digest, so that whoever reads it finds damaged bytes.

Its header begins with the SHA-256 of the file, as which 64 zeros count there:

    8 bytes of length · {"__metadata__":{"sha256":"DIGEST", …

A disk that returns other bits than were written to it does so without an error, and a sum of
gradients with another bit in it looks like any other.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from torch import Tensor

from gradbox_service.store.room import Room
from gradbox_worker.files.result_file import LENGTH_BYTES, write_result

KEY: Final = "sha256"
UNSEALED: Final = "0" * 64
BEGINNING: Final = f'{{"__metadata__":{{"{KEY}":"'.encode()
PLACE: Final = LENGTH_BYTES + len(BEGINNING)
BLOCK_BYTES: Final = 2**20


def write_sealed(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str], room: Room
) -> None:
    """Write a file and flush it; `path` is to be a name that nobody reads yet.

    Raises:
        InvalidInputs: a tensor's dtype has no place in a safetensors file.
        StorageFull: the disk does not hold it.
    """
    written = write_result(path, tensors, metadata={KEY: UNSEALED, **metadata}, room=room)
    with path.open("r+b") as file:
        file.seek(PLACE)
        file.write(written.sha256.encode())
        file.flush()
        os.fsync(file.fileno())


def is_whole(path: Path) -> bool:
    """Tell whether a file has the bytes that were written to it; reads all of them."""
    with path.open("rb") as file:
        beginning = file.read(PLACE)
        stated = file.read(len(UNSEALED))
        if not beginning.endswith(BEGINNING):
            return False
        digest = hashlib.sha256(beginning + UNSEALED.encode())
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest().encode() == stated
