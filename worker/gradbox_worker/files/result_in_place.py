"""A result that never lies in memory whole: its file is laid out first and filled piece by piece.

The header comes first in a safetensors file, but the receipt in it is known last. So the header is
given room, padded with spaces as the format allows, and written when all else is there. Pieces may
come in any order, so the digests are taken by reading the file once more. What follows the header
is moved where that outgrows its room, for tensors may be added that nobody knew of before.

A later attempt can go on with the file of one that was interrupted: `keep` flushes what was
written and gives the file a second name, which stays when the attempt's own is removed, and `go_on`
takes the file by that name. Who writes to a file holds its lock, which the kernel frees with the
process, so a file is never taken from an attempt that only seemed dead.

Shapes: B samples, Y outputs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from gradbox.protocol import ResultView
from gradbox.tensors.checksums import NAME as CHECKSUMS
from gradbox.tensors.checksums import shape_for
from gradbox.tensors.tensor_bytes import bytes_in_order
from gradbox_service.store.files import flush_folder, lock, make_folder, put_in_place
from gradbox_service.store.room import Room
from gradbox_worker.files.placed_rows import InPlaceWriter, Piece, Region
from gradbox_worker.files.result_file import (
    ALIGNMENT_BYTES,
    LENGTH_BYTES,
    RESULT,
    FileDigests,
    Written,
    header_bytes,
    laid_out,
    write_result,
)

# The receipt names a parameter at most four times, with its rules, and the metadata once where it
# is rounded; all quoted twice.
HEADER_ROOM_BYTES: Final = 64 * 2**10
HEADER_ROOM_A_TENSOR_BYTES: Final = 512
FILLER: Final = "filler"
READ_BYTES: Final = 4 * 2**20


class ResultOnDisk:
    """A result file while it is made.

    Leaving the context without `commit` leaves nothing, but what was kept under a second name.
    """

    def __init__(self, path: Path, *, room: Room, small_bytes: int = 0) -> None:
        """Write nothing yet.

        Args:
            small_bytes: see `write_result`.
        """
        self._small_bytes = small_bytes
        self._path = path
        self._disk = room
        self._partial = path.with_suffix(".partial")  # as ResultStore names it, which discards it
        self._writer: InPlaceWriter | None = None
        self._entries: dict[str, dict[str, Any]] = {}
        self._regions: dict[str, Region] = {}
        self._header_room = self._end = 0
        self._kept: Path | None = None

    def __enter__(self) -> ResultOnDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._partial.unlink(missing_ok=True)
            self._writer = None

    def lay_out(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        *,
        squeezed: bool,
    ) -> None:
        """Make room on disk for tensors that `write` fills.

        Args:
            shapes: name → (B, Y, *shape).
            squeezed: whether dim Y, of size 1, is left out of the shapes that the header states.

        Raises:
            InvalidInputs: a dtype has no place in a safetensors file.
            StorageFull: the disk does not hold it.
        """
        names = sorted(shapes, key=lambda name: -dtypes[name].itemsize)
        stated = {
            name: ((shapes[name][0], *shapes[name][2:]) if squeezed else shapes[name], dtypes[name])
            for name in names
        }
        self._allocate(stated)
        for name, entry in self._entries.items():
            _, outputs, *rest = shapes[name]
            rows = rest[0] if rest else 1
            row_bytes = torch.Size(rest[1:]).numel() * dtypes[name].itemsize
            start = self._data_start + entry["data_offsets"][0]
            self._regions[name] = Region(start, outputs, rows, row_bytes)

    def _allocate(self, stated: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._entries, self._regions = laid_out(stated), {}
        self._end = max((entry["data_offsets"][1] for entry in self._entries.values()), default=0)
        self._header_room = len(header_bytes(self._entries, {})) - LENGTH_BYTES + HEADER_ROOM_BYTES
        self._header_room += sum(
            HEADER_ROOM_A_TENSOR_BYTES + 10 * len(json.dumps(name)) for name in stated
        )
        self._header_room = -(-self._header_room // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        size_bytes = self._data_start + self._end
        if self._descriptor is None:
            self._writer = InPlaceWriter(self._created())
            self._disk.allocate(self._writer.descriptor, size_bytes, what=RESULT)
        elif os.fstat(self._descriptor).st_size < size_bytes:
            raise RuntimeError(
                f"expected at least {size_bytes} bytes in the file of the attempt before, got "
                f"{os.fstat(self._descriptor).st_size}: it was laid out otherwise"
            )
        else:
            os.ftruncate(self._descriptor, size_bytes)  # what `commit` may have added

    @property
    def rows_bytes(self) -> int:
        """What the tensors take that were laid out."""
        return self._end

    def keep(self, place: Path) -> str | None:
        """Flush what was written so far, for an attempt to come.

        Args:
            place: a second name for the file, in a folder of the same disk; one that it has stays.

        Returns:
            The file's second name; None if nothing was laid out.

        Raises:
            StorageFull: the disk does not hold it.
            OSError: the file cannot have a second name there.
        """
        if self._descriptor is None:
            return None
        with self._disk.noticing_a_full_disk(what=RESULT):
            os.fsync(self._descriptor)
        if self._kept is None:
            make_folder(place.parent)
            os.link(self._partial, place)
            flush_folder(place.parent)
            self._kept = place
        return self._kept.name

    def go_on(self, place: Path) -> bool:
        """Go on with a file that an earlier attempt kept; `lay_out` must be told what it was then.

        Returns:
            False if it is not there any more, or another process writes to it.
        """
        try:
            descriptor = os.open(place, os.O_RDWR)
        except FileNotFoundError:
            return False
        if not lock(descriptor):
            os.close(descriptor)
            return False
        make_folder(self._path.parent)
        self._partial.unlink(missing_ok=True)
        os.link(place, self._partial)
        self._writer, self._kept = InPlaceWriter(descriptor), place
        return True

    def _created(self) -> int:
        make_folder(self._path.parent)
        # Anew, for a file of that name may have been kept under another.
        self._partial.unlink(missing_ok=True)
        descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        lock(descriptor)  # where files cannot be locked, none is gone on with either
        return descriptor

    def write(self, name: str, at: Piece, piece: Tensor) -> None:
        """Write the piece (b, y, r, ...) at these samples, outputs and rows.

        Raises:
            StorageFull: the disk does not hold it.
        """
        assert self._writer is not None
        with self._disk.noticing_a_full_disk(what=RESULT):
            self._writer.piece(self._regions[name], at, piece)

    def commit(self, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> Written:
        """Add the tensors that are in memory and put the file in its place.

        Raises:
            InvalidInputs: a dtype has no place in a safetensors file.
            StorageFull: the disk does not hold it.
        """
        if not self._regions:
            self._close()  # a file that an earlier attempt laid out
            return write_result(
                self._path,
                tensors,
                metadata=metadata,
                room=self._disk,
                small_bytes=self._small_bytes,
            )
        self._disk.check(sum(tensor.nbytes for tensor in tensors.values()), what=RESULT)
        filler = torch.zeros(-self._end % ALIGNMENT_BYTES, dtype=torch.uint8)
        names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        added = {FILLER: filler} if filler.numel() and names else {}
        added |= {name: tensors[name] for name in names}
        stated = {name: (tuple(x.shape), x.dtype) for name, x in added.items()}
        self._entries |= laid_out(stated, at=self._end)
        data_bytes = max(entry["data_offsets"][1] for entry in self._entries.values())
        checksums = {CHECKSUMS: (shape_for(data_bytes), torch.uint8)}
        self._entries |= laid_out(checksums, at=data_bytes)
        self._make_header_fit(metadata)
        for name, tensor in added.items():
            start = self._entries[name]["data_offsets"][0]
            self._put(bytes_in_order(tensor), self._data_start + start)
        header = header_bytes(self._entries, metadata, at_least=self._header_room)
        self._put(memoryview(header), 0)
        return Written(self._put_in_place(header))

    def _make_header_fit(self, metadata: Mapping[str, str]) -> None:
        """Move what was written so far, from its end on, where the header outgrew its room."""
        assert self._writer is not None
        needed = len(header_bytes(self._entries, metadata)) - LENGTH_BYTES
        moved_by = needed - self._header_room
        if moved_by <= 0:
            return
        if self._kept is not None:
            self._kept.unlink(missing_ok=True)  # a later attempt would not find the rows in it
        self._disk.check(moved_by, what=RESULT)
        with self._disk.noticing_a_full_disk(what=RESULT):
            self._writer.move(self._data_start, self._data_start + self._end, by=moved_by)
        self._header_room = needed

    @property
    def _descriptor(self) -> int | None:
        return None if self._writer is None else self._writer.descriptor

    @property
    def _data_start(self) -> int:
        return LENGTH_BYTES + self._header_room

    def _put_in_place(self, header: bytes) -> ResultView:
        assert self._writer is not None
        assert self._descriptor is not None
        digests = FileDigests(header)
        # It had its size before its bytes: unflushed, a power cut would leave zeros in their place.
        with ThreadPoolExecutor(1, "flush") as beside_hashing:
            flushed = beside_hashing.submit(os.fsync, self._descriptor)
            with self._partial.open("rb") as file:
                file.seek(len(header))
                piece = file.read(READ_BYTES)
                while piece:
                    with digests.of(piece):
                        piece = file.read(READ_BYTES)
                size_bytes = file.tell()
            checksums = digests.finish()
            with self._disk.noticing_a_full_disk(what=RESULT):
                flushed.result()
                self._writer.put(memoryview(checksums), size_bytes)
                os.fsync(self._descriptor)
        put_in_place(self._partial, self._path)
        os.close(self._descriptor)
        self._writer = None
        return ResultView(size_bytes=size_bytes + len(checksums), sha256=digests.sha256.hexdigest())

    def _put(self, data: memoryview, offset: int) -> None:
        assert self._writer is not None
        with self._disk.noticing_a_full_disk(what=RESULT):
            self._writer.put(data, offset)
