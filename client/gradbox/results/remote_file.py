"""A result that stays on its box, of which ranges are read as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Final

import httpx

from gradbox.errors import BlobRejected, ProtocolError
from gradbox.http.connection import Connection
from gradbox.http.download import OnBytes, download
from gradbox.protocol import ResultView
from gradbox.results.factors import StoredTensor
from gradbox.results.result_files import (
    ReadInPlace,
    dtype_name,
    rounded_tensors,
    stored_tensors,
    tensor_of,
)
from gradbox.tensors import checksums
from gradbox.tensors.lazy_tensor import LazyTensor, Region, array_of
from gradbox.tensors.safetensors_header import (
    DTYPE_BYTES,
    LENGTH_BYTES,
    SafetensorsHeader,
    TensorEntry,
    header_length,
    parse_header,
)

# One request brings most headers whole.
FIRST_BYTES: Final = 64 * 2**10
# Bytes between two wanted ranges that cost less than another request.
GAP_BYTES: Final = 256 * 2**10
# The most that one request asks for.
REQUEST_BYTES: Final = 64 * 2**20


class RemoteFile(ReadInPlace):
    """A result that stays on its box; ranges of bytes are fetched as tensors are indexed.

    Args:
        connection: the box.
        url_path: where the file is there.
        expected: what the box said of it.
        downloading: the context of a download of all of it; gives what is called with its bytes.
    """

    def __init__(
        self,
        connection: Connection,
        url_path: str,
        *,
        expected: ResultView,
        downloading: Callable[[], AbstractContextManager[OnBytes | None]] = nullcontext,
    ) -> None:
        self._downloading = downloading
        self._connection = connection
        self._url_path = url_path
        self._expected = expected
        self._first = bytearray()  # of the file: at least its header, of a small one all
        self._checksums = b""
        self._header = self._read_header()
        self.metadata = self._header.metadata
        self._rounded = rounded_tensors(self.metadata)
        self.names = tuple(self._header.tensors)

    def __str__(self) -> str:
        return f"{self._connection.url}{self._url_path}"

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        return stored_tensors(self._header)

    def tensor(self, name: str) -> LazyTensor:
        entry, wider = self._header.tensors[name], self._rounded.get(name)
        return LazyTensor(
            entry.shape,
            lambda region: self._read(entry, region, wider),
            dtype=lambda: _dtype(wider or dtype_name(entry)),
        )

    def data_of(self, name: str) -> Iterator[memoryview]:
        """Give the bytes of a tensor as they are stored, some at a time."""
        entry = self._header.tensors[name]
        for first in range(entry.begin, entry.end, REQUEST_BYTES):
            yield self._fetch_data(first, min(first + REQUEST_BYTES, entry.end))

    def copy_to(self, path: Path) -> None:
        with self._downloading() as on_bytes:
            download(
                self._connection,
                self._url_path,
                path,
                expected=self._expected,
                on_bytes=on_bytes,
            )

    def _read_header(self) -> SafetensorsHeader:
        size_bytes = self._expected.size_bytes
        try:
            self._first = first = self._fetch(0, min(FIRST_BYTES, size_bytes))
            length = header_length(bytes(first[:LENGTH_BYTES]), file_bytes=size_bytes)
            if LENGTH_BYTES + length > len(first):
                first += self._fetch(len(first), LENGTH_BYTES + length)
            text = bytes(first[LENGTH_BYTES : LENGTH_BYTES + length])
            header = parse_header(text, file_bytes=size_bytes)
            self._read_checksums(header)
            return header
        except BlobRejected as error:
            raise ProtocolError(f"{self}: expected a result file of gradbox: {error}") from None

    def _read_checksums(self, header: SafetensorsHeader) -> None:
        """Read those of all blocks, which older results lack, and compare the header's."""
        entry, start = header.tensors.get(checksums.NAME), header.data_start
        if entry is None:
            return
        self._checksums = bytes(self._fetch(start + entry.begin, start + entry.end))
        if not self._checksums.startswith(checksums.checksum(self._first[:start])):
            raise self._damaged(0, start)

    def _fetch_data(self, first: int, last: int) -> memoryview:
        """Return the bytes first:last behind the header, compared where there are checksums."""
        start = self._header.data_start
        if not self._checksums:
            return memoryview(self._fetch(start + first, start + last))
        data_bytes = self._header.tensors[checksums.NAME].begin
        begin, end = checksums.whole_blocks(first, last, data_bytes=data_bytes)
        blocks = self._fetch(start + begin, start + end)
        if not checksums.agree(self._checksums, blocks, first=begin):
            raise self._damaged(start + begin, start + end)
        return memoryview(blocks)[first - begin : last - begin]

    def _damaged(self, first: int, last: int) -> ProtocolError:
        return ProtocolError(
            f"{self}: expected the bytes {first} to {last} as they were written, got others: the "
            f"box's disk has damaged them; submit the job again, and tell the box's owner"
        )

    def _read(self, entry: TensorEntry, region: Region, wider: str | None) -> Any:
        """Fetch the part of a tensor that `region` bounds, and widen it where it was rounded."""
        shape = tuple(part.stop - part.start for part in region) + entry.shape[len(region) :]
        data = bytearray(prod(shape) * DTYPE_BYTES[entry.dtype])
        at = 0
        for first, last, runs in _requests(entry, region):
            data_of = self._fetch_data(first, last)
            for begin, end in runs:
                data[at : at + end - begin] = data_of[begin - first : end - first]
                at += end - begin
        return tensor_of(data, entry, shape=shape, wider=wider)

    def _fetch(self, first: int, last: int) -> bytearray:
        """Return the file's bytes first:last."""
        if last <= len(self._first):
            return self._first[first:last]
        found = bytearray()
        while first + len(found) < last:
            begin = first + len(found)
            found += self._fetch_once(begin, min(last, begin + REQUEST_BYTES))
        return found

    def _fetch_once(self, first: int, last: int) -> bytes:
        headers = {"Range": f"bytes={first}-{last - 1}", "Accept-Encoding": "identity"}
        answer = self._connection.request("GET", self._url_path, headers=headers)
        etag = answer.headers.get("etag", "")
        partial = answer.status_code == httpx.codes.PARTIAL_CONTENT
        if not partial or len(answer.content) != last - first:
            raise ProtocolError(
                f"{self}: expected the bytes {first} to {last}, got status {answer.status_code} "
                f"with {len(answer.content)} bytes"
            )
        if etag != f'"{self._expected.sha256}"':
            raise ProtocolError(
                f"{self}: expected the result with SHA-256 {self._expected.sha256}, got another "
                f"({etag or 'without an ETag'}); open the job's result again"
            )
        return answer.content


def _requests(
    entry: TensorEntry, region: Region
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Yield what to fetch: (first byte, last byte, the wanted runs within), near runs together."""
    first = last = 0
    together: list[tuple[int, int]] = []
    for begin, end in _runs(entry, region):
        if together and (begin - last > GAP_BYTES or end - first > REQUEST_BYTES):
            yield first, last, together
            together = []
        if not together:
            first = begin
        together.append((begin, end))
        last = end
    if together:
        yield first, last, together


def _runs(entry: TensorEntry, region: Region) -> Iterator[tuple[int, int]]:
    """Yield the ranges of bytes behind the header that hold `region`, in order."""
    shape = entry.shape
    cut = [dim for dim, part in enumerate(region) if part.stop - part.start != shape[dim]]
    dim = cut[-1] if cut else 0
    part = region[dim] if region else slice(0, shape[0] if shape else 1)
    inner_bytes = prod(shape[dim + 1 :]) * DTYPE_BYTES[entry.dtype]
    strides = [prod(shape[outer + 1 :]) * DTYPE_BYTES[entry.dtype] for outer in range(dim)]
    for index in product(*(range(outer.start, outer.stop) for outer in region[:dim])):
        base = sum(i * stride for i, stride in zip(index, strides, strict=True))
        begin = entry.begin + base + part.start * inner_bytes
        end = begin + (part.stop - part.start) * inner_bytes
        if end > begin:
            yield begin, end


def _dtype(name: str) -> Any:
    return array_of(bytearray(), dtype=name, shape=(0,)).dtype
