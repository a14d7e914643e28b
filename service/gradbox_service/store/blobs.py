"""Uploaded blobs, each a whole, checked safetensors file: small ones are in Redis, see `small`.

The others are in DATA/blobs/aa/SHA256. One is written beside its place, checked, flushed and
renamed, so what has a blob's name is that blob, whatever died. Files are never changed or truncated
afterwards: a worker may have them mapped.

A disk may return other bytes all the same. So each process hashes a blob before it first uses it,
and again once its file was written to; one that has another digest is not here, until its owner
sends it again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import redis
from redis.client import Pipeline

from gradbox.errors import BlobRejected
from gradbox.tensors.safetensors_header import SafetensorsHeader, header_of
from gradbox_service.store.files import (
    WRITE_OUT_BYTES,
    FileState,
    FileUse,
    begin_to_write_out,
    lock,
    make_folder,
    put_in_place,
    touch,
    use_of,
)
from gradbox_service.store.room import Room
from gradbox_service.store.small import SmallFiles

log = logging.getLogger(__name__)

# Headers kept in memory hold this many tensors together, about 250 MB.
CACHED_TENSORS = 500_000
UNLOCKED_S = 1.0  # for an upload to lock the file that it has just made
ASIDE = ".aside"  # of a blob that is being removed
STALE_UPLOAD_S = 24 * 3600
BLOB = "this blob"


class BlobStore:
    """The blobs under one folder and in one Redis, shared by every process of the box."""

    def __init__(
        self,
        data: Path,
        *,
        connection: redis.Redis | None = None,
        reserve_bytes: int | None = None,
    ) -> None:
        """Open the blobs of the box whose data is in this folder; see `Room` for the reserve.

        Args:
            connection: of its Redis, where small ones are; without it all are files.
        """
        self._root = data / "blobs"
        self.room = Room(self._root, reserve_bytes)
        self._small = SmallFiles(connection, "blob")
        # Of the blobs that were hashed, each with the file that was.
        self._headers: OrderedDict[str, tuple[FileState, SafetensorsHeader]] = OrderedDict()
        self._cached = 0
        self._lock = threading.Lock()

    def path(self, digest: str) -> Path:
        """Return where the blob is, or would be."""
        return self._root / digest[:2] / digest

    def takes_small(self, num_bytes: int) -> bool:
        """Return whether a blob of this size is written by `write_small`."""
        return self._small.take(num_bytes)

    def write_small(self, pipe: Pipeline, digest: str, content: bytes) -> None:
        """Write a blob whose bytes were checked by the transaction that makes it somebody's."""
        self._small.write(pipe, digest, content)

    def small(self, digest: str) -> bytes | None:
        """Return a blob that is in Redis; None for any other, or a damaged one.

        One of a small number of bytes is hashed sooner than it is remembered.
        """
        return _undamaged(digest, self._small.read(digest))

    def on_disk(self, digest: str) -> None:
        """Have a small blob in the folder, too, for who sees that and not the Redis."""
        content = None if self.path(digest).exists() else self.small(digest)
        if content is not None:
            self.put(digest, [content])

    def uses(self, digests: Collection[str]) -> dict[str, FileUse]:
        """Return the size and last use of each blob that is here; to ask is no use."""
        found = dict(self._small.uses(digests))
        for digest in digests:
            if digest not in found and (in_file := use_of(self.path(digest))) is not None:
                found[digest] = in_file
        return found

    def use_of(self, digest: str) -> FileUse | None:
        """Return the blob's size and last use; None if it is not here."""
        return self.uses([digest]).get(digest)

    def size_bytes(self, digest: str) -> int | None:
        """Return the blob's size, or None if it is not here or damaged. Whoever asks uses it."""
        if self.header(digest) is None:
            return None
        found = self.use_of(digest)
        return None if found is None else found.size_bytes

    def headers(self, digests: Collection[str]) -> dict[str, SafetensorsHeader]:
        """Return the headers of the blobs that are here and undamaged. Whoever asks uses them."""
        small = self._small.read_many(list(digests), used=True)
        found = {digest: self._header(digest, small.get(digest)) for digest in digests}
        return {digest: header for digest, header in found.items() if header is not None}

    def header(self, digest: str) -> SafetensorsHeader | None:
        """Return the blob's header, or None if it is not here or damaged. Whoever asks uses it."""
        return self.headers([digest]).get(digest)

    def _header(self, digest: str, small: bytes | None) -> SafetensorsHeader | None:
        if (content := _undamaged(digest, small)) is not None:
            return header_of(BytesIO(content))
        # The box may have removed the blob since its header was read. The use is noted before the
        # look, so that a cleaner either sees it or has removed the blob already.
        state = touch(self.path(digest))
        if state is None:
            return None
        with self._lock:
            known, header = self._headers.get(digest, (None, None))
            if known == state:
                self._headers.move_to_end(digest)
                return header
        try:
            return self._read(digest)
        except FileNotFoundError:
            return None

    def _read(self, digest: str) -> SafetensorsHeader | None:
        """Hash a blob and read its header; None if it is damaged.

        Raises:
            FileNotFoundError: it is not here.
        """
        with self.path(digest).open("rb") as file:
            state = FileState.of(os.fstat(file.fileno()))
            if hashlib.file_digest(file, "sha256").hexdigest() == digest:
                header = header_of(file)
                self._remember(digest, state, header)
                return header
        log.warning("the blob %s is damaged on the disk, and is to be sent again", digest)
        os.utime(self.path(digest))  # as if written now, so that other processes hash it, too
        return None

    def upload(self, digest: str, *, announced_bytes: int = 0) -> Upload:
        """Begin to write the blob; use the result as a context manager.

        Args:
            announced_bytes: how large it is said to be; 0 if nothing is said.

        Raises:
            StorageFull: there is no room for it.
        """
        self.room.check(announced_bytes, what=BLOB)
        incoming = self._root / "incoming"
        path = incoming / f"{digest}.{secrets.token_hex(8)}"
        with self.room.noticing_a_full_disk(what=BLOB):
            make_folder(incoming)
            return Upload(
                digest,
                incoming=path,
                destination=self.path(digest),
                room=self.room,
                committed=partial(self._remember, digest),
            )

    def put(self, digest: str, chunks: Iterable[bytes]) -> None:
        """Write a whole blob.

        Raises:
            BlobRejected: see `Upload.commit`.
            StorageFull: there is no room for it.
        """
        with self.upload(digest) as upload:
            for chunk in chunks:
                upload.write([chunk])
            upload.commit()

    def files(self) -> Iterator[tuple[str, FileUse]]:
        """Give the digest, the size and the last use of every blob."""
        in_redis = dict(self._small.all())
        yield from in_redis.items()
        for path in self._root.glob("[0-9a-f][0-9a-f]/*"):
            found = use_of(path) if path.name not in in_redis else None
            if found is not None:
                yield path.name, found

    def write_out(self) -> None:
        """Move small blobs that are kept for long into files.

        Raises:
            StorageFull: the disk does not hold them.
        """

        def write(digest: str, content: bytes, found: FileUse) -> None:
            self.put(digest, [content])
            os.utime(self.path(digest), (found.used_s, found.used_s))

        self._small.write_out(write)

    def remove(self, digest: str, *, unused_since_s: float) -> bool:
        """Remove the blob unless it was used after a time; return whether it went."""
        if self._small.remove(digest, unused_since_s=unused_since_s):
            self.path(digest).unlink(missing_ok=True)
            return True
        destination = self.path(digest)
        aside = self._root / "incoming" / f"{digest}.{secrets.token_hex(8)}{ASIDE}"
        make_folder(aside.parent)
        try:
            destination.rename(aside)
        except FileNotFoundError:
            return False
        # Looked at where nobody finds it any more, so that a use is either seen here or not made.
        found = use_of(aside)
        if found is not None and found.used_s > unused_since_s:
            put_in_place(aside, destination)
            return False
        aside.unlink(missing_ok=True)
        return True

    def sweep(self) -> None:
        """Remove what uploads that died left behind.

        An upload holds the lock of its file, which the kernel gives back when the process ends.
        """
        for path in (self._root / "incoming").glob("*.*"):
            with suppress(FileNotFoundError):
                idle_s = time.time() - path.stat().st_mtime
                if idle_s > STALE_UPLOAD_S or (
                    idle_s > UNLOCKED_S and path.suffix != ASIDE and _is_unlocked(path)
                ):
                    path.unlink()

    def _remember(self, digest: str, state: FileState, header: SafetensorsHeader) -> None:
        """Note that a file has been hashed, and keep its header."""
        with self._lock:
            _, before = self._headers.pop(digest, (None, None))
            self._headers[digest] = (state, header)
            self._cached += len(header.tensors) - (0 if before is None else len(before.tensors))
            while self._cached > CACHED_TENSORS and len(self._headers) > 1:
                _, (_, oldest) = self._headers.popitem(last=False)
                self._cached -= len(oldest.tensors)


class Upload:
    """One blob on its way in. Leaving the context without `commit` leaves nothing behind."""

    def __init__(
        self,
        digest: str,
        *,
        incoming: Path,
        destination: Path,
        room: Room,
        committed: Callable[[FileState, SafetensorsHeader], None],
    ) -> None:
        self._committed = committed
        self._digest = digest
        self._room = room
        self._incoming = incoming
        self._destination = destination
        self._hash = hashlib.sha256()
        self._file: BinaryIO = incoming.open("x+b")
        lock(self._file.fileno())  # without locks there, the file is swept after a day
        self.size_bytes = 0

    def write(self, chunks: Sequence[bytes]) -> None:
        """Append chunks, and hash them.

        Raises:
            StorageFull: there is no room for them.
        """
        num_bytes = sum(map(len, chunks))
        self._room.check(num_bytes, what=BLOB)
        with self._room.noticing_a_full_disk(what=BLOB):
            self._file.writelines(chunks)
        for chunk in chunks:
            self._hash.update(chunk)
        before, self.size_bytes = self.size_bytes, self.size_bytes + num_bytes
        if self.size_bytes // WRITE_OUT_BYTES > before // WRITE_OUT_BYTES:
            begin_to_write_out(self._file.fileno())

    def commit(self) -> None:
        """Check what was written, and put it in its place.

        Raises:
            BlobRejected: the digest differs, or it is not a whole safetensors file.
            StorageFull: the disk does not hold it.
        """
        found = self._hash.hexdigest()
        if found != self._digest:
            raise BlobRejected(
                f"the {self.size_bytes} bytes that came have the SHA-256 {found}, expected "
                f"{self._digest}; send them again, and if it repeats, compute the digest anew"
            )
        with self._room.noticing_a_full_disk(what=BLOB):
            self._file.flush()
            os.fsync(self._file.fileno())
            header, state = header_of(self._file), FileState.of(os.fstat(self._file.fileno()))
            put_in_place(self._incoming, self._destination)
        self._committed(state, header)

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._file.close()
        self._incoming.unlink(missing_ok=True)


def _undamaged(digest: str, content: bytes | None) -> bytes | None:
    """Return a blob that was read from Redis; None for a damaged one, or none."""
    if content is None or hashlib.sha256(content).hexdigest() == digest:
        return content
    log.warning("the blob %s is damaged in Redis, and is to be sent again", digest)
    return None


def _is_unlocked(path: Path) -> bool:
    with path.open("rb") as file:
        return lock(file.fileno())
