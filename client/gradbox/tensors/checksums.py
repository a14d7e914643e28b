"""Checksums of a result file, by which a part of it is compared without the rest.

The file's last tensor, `checksums`, has a CRC-32 for its header and one for each block of 64 KiB of
what lies between the two. It comes last, so that a file is written and hashed once, in order.

They find what a disk damaged: a flipped bit always, any other change but once in 2^32 blocks. They
are no defence against malice. A file that is fetched whole is compared by its SHA-256.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import BinaryIO, Final

from gradbox.errors import BlobRejected
from gradbox.tensors.safetensors_header import SafetensorsHeader, header_of

NAME: Final = "checksums"
BLOCK_BYTES: Final = 64 * 2**10
CHECKSUM_BYTES: Final = 4
READ_BYTES: Final = 16 * BLOCK_BYTES


def shape_for(data_bytes: int) -> tuple[int, int]:
    """Return the tensor's shape, in U8, where so many bytes lie between header and tensor."""
    return 1 + -(-data_bytes // BLOCK_BYTES), CHECKSUM_BYTES


class Checksums:
    """Those of a file that is given from its beginning on, in pieces of any size."""

    def __init__(self, header: bytes) -> None:
        """Begin with all that comes before the first tensor."""
        self._ended = bytearray(checksum(header))
        self._crc = self._in_block = 0

    def update(self, piece: bytes | memoryview) -> None:
        """Add what comes next."""
        rest = memoryview(piece)
        while len(rest):
            taken = rest[: BLOCK_BYTES - self._in_block]
            rest = rest[len(taken) :]
            self._crc = zlib.crc32(taken, self._crc)
            self._in_block += len(taken)
            if self._in_block == BLOCK_BYTES:
                self._end_block()

    def finish(self) -> bytes:
        """Return the bytes of the tensor."""
        if self._in_block:
            self._end_block()
        return bytes(self._ended)

    def _end_block(self) -> None:
        self._ended += self._crc.to_bytes(CHECKSUM_BYTES, "little")
        self._crc = self._in_block = 0


def checksum(header: bytes | bytearray | memoryview) -> bytes:
    """Return the first entry of the tensor."""
    return zlib.crc32(header).to_bytes(CHECKSUM_BYTES, "little")


def whole_blocks(first: int, last: int, *, data_bytes: int) -> tuple[int, int]:
    """Return where the blocks begin and end that hold the bytes first:last behind the header."""
    begin, end = first // BLOCK_BYTES, -(-last // BLOCK_BYTES)
    return begin * BLOCK_BYTES, min(end * BLOCK_BYTES, data_bytes)


def agree(stored: bytes, blocks: bytes | bytearray, *, first: int) -> bool:
    """Tell whether blocks, of which one begins `first` bytes behind the header, are as written."""
    found = b"".join(
        checksum(memoryview(blocks)[start : start + BLOCK_BYTES])
        for start in range(0, len(blocks), BLOCK_BYTES)
    )
    return stored.startswith(found, CHECKSUM_BYTES * (1 + first // BLOCK_BYTES))


def checked_header(file: BinaryIO) -> SafetensorsHeader:
    """Read the header of a result and compare it with its checksum, where there is one.

    Raises:
        BlobRejected: it is damaged, or the file is not a whole one.
        OSError: it cannot be read.
    """
    header = header_of(file)
    entry = header.tensors.get(NAME)
    if entry is not None:
        file.seek(0)
        found = checksum(file.read(header.data_start))
        file.seek(header.data_start + entry.begin)
        if file.read(CHECKSUM_BYTES) != found:
            raise BlobRejected("expected a result's header with its checksum, got another")
    return header


def is_whole(path: Path) -> bool:
    """Tell whether a result file is as it was written; reads all of it.

    Of one without checksums, as boxes wrote them before, its header alone can tell.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    with path.open("rb") as file:
        try:
            header = header_of(file)
        except BlobRejected:
            return False
        entry = header.tensors.get(NAME)
        if entry is None:
            return True
        file.seek(0)
        found, left = Checksums(file.read(header.data_start)), entry.begin
        while left:
            piece = file.read(min(READ_BYTES, left))
            if not piece:
                return False
            found.update(piece)
            left -= len(piece)
        return file.read() == found.finish()
