"""Reading single tensors out of safetensors blobs, a shard at a time.

Small blobs come whole, out of Redis. Of a file, tensors are read at their offset into memory of
their own; of a blob that a client of this process hands over, out of the client's tensors.
`safetensors.safe_open` maps the file instead, and its tensors alias the mapping: a model that
changes its input in place would change what the replay reads, and every shard ever read would count
towards the process's resident set. Weights are mapped: the engine copies them into the model once,
and nothing else looks at them.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Final, Protocol, overload

import torch
from torch import Tensor

from gradbox.errors import BlobRejected, InvalidInputs, MissingBlobs
from gradbox.protocol import ShardRef, TensorRef
from gradbox.tensors.blob import Blob
from gradbox.tensors.safetensors_header import SafetensorsHeader, TensorEntry, header_of
from gradbox_worker.files.safetensors_types import TORCH_DTYPES

MAX_OPEN_FILES: Final = 64
ENDS_EARLY: Final = "expected a whole blob, got one that ends early; upload it again"


class Blobs(Protocol):
    """Where uploaded blobs lie: `gradbox_service.store.BlobStore`."""

    def small(self, digest: str) -> bytes | None: ...
    def path(self, digest: str) -> Path: ...
    def header(self, digest: str) -> SafetensorsHeader | None: ...


class _Blob(ABC):
    def __init__(self, header: SafetensorsHeader) -> None:
        self.entries = header.tensors
        self.names_under = header.names_under
        self._data_start = header.data_start

    def read(self, name: str, *, pinned: bool = False) -> Tensor:
        """Read a tensor to the host, into page-locked memory if it is to be copied from there."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=self.dtype(name), pin_memory=pinned)
        if entry.begin < entry.end:
            memory = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
            self._read_into(memory, name)
        return tensor

    def mapped(self, name: str) -> Tensor:
        """Return a tensor for which no memory is taken where that can be helped."""
        return self.read(name)

    @abstractmethod
    def _read_into(self, memory: memoryview, name: str) -> None:
        """Fill memory with a tensor's bytes."""

    def close(self) -> None:
        """Close what is open."""
        return  # nothing, where the bytes are in memory

    def _begin(self, name: str) -> int:
        """Return where a tensor's bytes begin in the blob."""
        return self._data_start + self.entries[name].begin

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor; `BlobRejected` where torch has none."""
        dtype = TORCH_DTYPES.get(self.entries[name].dtype)
        if dtype is None:
            raise BlobRejected(
                f"expected tensors of {', '.join(TORCH_DTYPES)}, got {name!r} of "
                f"{self.entries[name].dtype}; convert it"
            )
        return dtype


class _SmallBlob(_Blob):
    """One whose bytes are in memory."""

    def __init__(self, content: bytes) -> None:
        super().__init__(header_of(BytesIO(content)))
        self._content = content

    def _read_into(self, memory: memoryview, name: str) -> None:
        begin = self._begin(name)
        memory[:] = self._content[begin : begin + len(memory)]


class _HandedOver(_Blob):
    """One whose tensors are those of a client of this process."""

    def __init__(self, blob: Blob) -> None:
        super().__init__(blob.header)
        self._tensors = blob.tensors

    def _read_into(self, memory: memoryview, name: str) -> None:
        memory[:] = self._tensors[name].view()


class _BlobFile(_Blob):
    """One in the data folder."""

    def __init__(self, path: Path, header: SafetensorsHeader) -> None:
        super().__init__(header)
        self._fd = os.open(path, os.O_RDONLY)

    def _read_into(self, memory: memoryview, name: str) -> None:
        begin, done = self._begin(name), 0
        while done < len(memory):
            got = os.preadv(self._fd, [memory[done:]], begin + done)
            if got == 0:
                raise BlobRejected(ENDS_EARLY)
            done += got

    def mapped(self, name: str) -> Tensor:
        """Return a tensor in the file's own pages; what is written to it, the file does not get."""
        entry, dtype = self.entries[name], self.dtype(name)
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        begin, size_bytes = self._begin(name), entry.end - entry.begin
        skipped = begin % mmap.ALLOCATIONGRANULARITY
        try:
            pages = mmap.mmap(
                self._fd, skipped + size_bytes, offset=begin - skipped, access=mmap.ACCESS_COPY
            )
        except ValueError:
            raise BlobRejected(ENDS_EARLY) from None
        flat = torch.frombuffer(pages, dtype=torch.uint8, count=size_bytes, offset=skipped)
        return flat.view(dtype).reshape(entry.shape)

    def close(self) -> None:
        os.close(self._fd)


class BlobTensors:
    """The tensors of blobs; those used last stay open. Close it, or use `with`."""

    def __init__(self, blobs: Blobs | Mapping[str, Blob], *, device: torch.device) -> None:
        """Open none yet.

        Args:
            blobs: where they are stored; or those that a client of this process hands over.
        """
        self.blobs = blobs
        self.device = device
        self._open: OrderedDict[str, _Blob] = OrderedDict()

    def __enter__(self) -> BlobTensors:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def tensor(self, ref: TensorRef) -> Tensor:
        """Read one tensor to the device.

        Raises:
            MissingBlobs: the blob is not stored, or damaged.
            BlobRejected: it ends early, or has a dtype that torch lacks.
            InvalidInputs: it has no tensor of that name.
        """
        return self._having(ref).read(ref.tensor).to(self.device)

    def shared(self, ref: TensorRef) -> Tensor:
        """Return one tensor on the host, in memory that is not its own: to be copied at once.

        Raises: as `tensor`.
        """
        return self._having(ref).mapped(ref.tensor)

    def shard(self, ref: ShardRef) -> dict[str, Tensor]:
        """Read one shard to the host: argument name → tensor.

        For CUDA they lie in page-locked memory, from which the engine copies them while it
        computes.

        Raises:
            MissingBlobs: the blob is not stored, or damaged.
            BlobRejected: it ends early, or has a dtype that torch lacks.
            InvalidInputs: it has no tensor whose name begins with the prefix.
        """
        blob, pinned = self._blob(ref.blob), self.device.type == "cuda"
        return {
            name.removeprefix(ref.prefix): blob.read(name, pinned=pinned)
            for name in _names_under(ref, blob)
        }

    def forms(self, ref: ShardRef) -> dict[str, Tensor]:
        """Return a shard unread: tensors on the meta device, which have a shape and a dtype.

        Raises: as `shard`.
        """
        blob = self._blob(ref.blob)
        return {
            name.removeprefix(ref.prefix): torch.empty(
                blob.entries[name].shape, dtype=blob.dtype(name), device="meta"
            )
            for name in _names_under(ref, blob)
        }

    def num_bytes(self, digest: str) -> int:
        """Return how many bytes the tensors of a blob have.

        Raises:
            MissingBlobs: the blob is not stored, or damaged.
        """
        return max((entry.end for entry in self._blob(digest).entries.values()), default=0)

    def shards(self, refs: Sequence[ShardRef]) -> LazyShards:
        """Return the shards as a sequence that reads each one when it is asked for."""
        return LazyShards(self, refs)

    def _having(self, ref: TensorRef) -> _Blob:
        """Return the blob that has a tensor."""
        blob = self._blob(ref.blob)
        if ref.tensor not in blob.entries:
            raise InvalidInputs(
                f"expected a tensor {ref.tensor!r} in blob {ref.blob[:12]}…, which has "
                f"{_listed(blob.entries)}; check the names in the job"
            )
        return blob

    def _blob(self, digest: str) -> _Blob:
        blob = self._open.get(digest)
        if blob is None:
            blob = self._open[digest] = self._opened(digest)
            while len(self._open) > MAX_OPEN_FILES:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(digest)
        return blob

    def _opened(self, digest: str) -> _Blob:
        stored = self.blobs
        if isinstance(stored, Mapping):
            return _HandedOver(stored[digest])
        content = stored.small(digest)
        if content is not None:
            return _SmallBlob(content)
        header = stored.header(digest)
        if header is not None:
            # It may be removed between the look at its header and this.
            with suppress(FileNotFoundError):
                return _BlobFile(stored.path(digest), header)
        raise MissingBlobs(
            f"expected blob {digest} to be stored as it was sent, but it is gone, or damaged on "
            f"the box's disk; submit the job again, which uploads it again",
            missing=(digest,),
        )


class LazyShards(Sequence[Mapping[str, Tensor]]):
    """Shards that are read when they are used, and again for their replay."""

    def __init__(self, tensors: BlobTensors, refs: Sequence[ShardRef]) -> None:
        self._tensors = tensors
        self._refs = refs

    def __len__(self) -> int:
        return len(self._refs)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Tensor]]: ...
    def __getitem__(
        self, index: int | slice
    ) -> Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]:
        if isinstance(index, slice):
            return LazyShards(self._tensors, self._refs[index])
        return self._tensors.shard(self._refs[index])

    def form(self, index: int) -> Mapping[str, Tensor]:
        """Return a shard unread, see `BlobTensors.forms`."""
        return self._tensors.forms(self._refs[index])


def _names_under(ref: ShardRef, blob: _Blob) -> Sequence[str]:
    names = blob.names_under(ref.prefix)
    if not names:
        raise InvalidInputs(
            f"expected tensors {ref.prefix!r}… in blob {ref.blob[:12]}…, which has "
            f"{_listed(blob.entries)}; check the prefix in the job"
        )
    return names


def _listed(entries: Mapping[str, TensorEntry]) -> str:
    names = sorted(entries)
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if names[5:] else "")
