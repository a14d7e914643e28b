"""Reads the header of a safetensors file, and refuses a file that is not exactly one.

The format (huggingface/safetensors, README.md): 8 bytes, the header's length N as a little-endian
unsigned integer; N bytes of UTF-8 JSON that begin with `{` and may be padded with spaces; then the
tensors' bytes. The JSON maps each tensor's name to its dtype, shape and data_offsets [begin, end)
within those bytes, and `__metadata__` to a map of strings.

A file MUST have no name twice, ranges that agree with dtype and shape, and ranges that fill the
rest of the file without gap or overlap. Then nothing can hide in a file, and a reader that maps it
never reaches past its end.
"""

from __future__ import annotations

import json
import math
import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn, TypeVar

from gradbox.errors import BlobRejected

Value = TypeVar("Value")

# Bytes of one entry. Types below a byte (F4, F6) are left out: torch has no plain tensor of them.
DTYPE_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

# About 150 000 tensors. The format's own limit is 100 MB, which takes a reader a second and a
# gigabyte to take in.
MAX_HEADER_BYTES: Final = 16 * 2**20
# What else is sometimes named .safetensors, by how it begins, and what to do about it.
_PICKLE: Final = (
    "a pickle, as torch.save writes: load it where you trust it, and save it by "
    "safetensors.torch.save_file"
)
OTHER_FORMATS: Final[Mapping[bytes, str]] = {
    b"version https://git-lfs": "a git-lfs pointer: fetch the file itself by `git lfs pull`",
    b"<": "a web page, which a download that failed leaves: fetch the file again, logged in",
    b"PK\x03\x04": _PICKLE,
    b"\x80": _PICKLE,
}
MAX_DIMENSIONS: Final = 64
MAX_ENTRY_CHARACTERS: Final = 4096
LENGTH_BYTES: Final = 8


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file; `begin` and `end` count bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """What a file holds; `data_start` is the offset of its first tensor's bytes."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int

    def names_under(self, prefix: str) -> list[str]:
        """Return the tensors whose names begin with `prefix`, in the order of the file.

        A file of many shards is asked for each of them: that costs a search, not a look at every
        name.
        """
        stop = start = bisect_left(self._by_name, (prefix, -1))
        while stop < len(self._by_name) and self._by_name[stop][0].startswith(prefix):
            stop += 1
        return [name for name, _ in sorted(self._by_name[start:stop], key=lambda item: item[1])]

    @cached_property
    def _by_name(self) -> list[tuple[str, int]]:
        """Every name with its place in the file, in the order of names."""
        return sorted((name, place) for place, name in enumerate(self.tensors))


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header of the file at `path`; the tensors' bytes are not read.

    Raises:
        BlobRejected: it is not a safetensors file, or not a whole one.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return header_of(file)


def other_format(path: Path) -> str | None:
    """Say what a file is that safetensors could not read, and what to do; None if unknown."""
    try:
        with path.open("rb") as file:
            first_bytes = file.read(max(map(len, OTHER_FORMATS)))
    except OSError:
        return None
    found = (what for begin, what in OTHER_FORMATS.items() if first_bytes.startswith(begin))
    return next(found, None)


def header_of(file: BinaryIO) -> SafetensorsHeader:
    """Read and check the header of an open file, from its beginning on.

    Raises:
        BlobRejected, OSError: as for `read_header`.
    """
    file_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = header_length(file.read(LENGTH_BYTES), file_bytes=file_bytes)
    return parse_header(file.read(length), file_bytes=file_bytes)


def header_length(first_bytes: bytes, *, file_bytes: int) -> int:
    """Return the length of the JSON that the first eight bytes announce.

    Raises:
        BlobRejected: the file is too short, or the length is not a credible one.
    """
    if len(first_bytes) < LENGTH_BYTES:
        _refuse(f"it has {len(first_bytes)} bytes; a safetensors file has at least 10")
    length = int.from_bytes(first_bytes[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        _refuse(
            f"its header claims {length} bytes, at most {MAX_HEADER_BYTES} are allowed; "
            "save it with safetensors, or with fewer tensors to a file"
        )
    if LENGTH_BYTES + length > file_bytes:
        _refuse(f"its header claims {length} bytes but the file ends after {file_bytes}")
    return length


def parse_header(text: bytes, *, file_bytes: int) -> SafetensorsHeader:
    """Check a header's JSON against the size of its whole file.

    Raises:
        BlobRejected: any rule of the format is broken; the message names the tensor and the rule.
    """
    tensors, metadata = _load(text)
    data_start = LENGTH_BYTES + len(text)
    position = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            kind = "overlaps the one before" if entry.begin < position else "leaves a gap"
            _refuse(f"tensor {name!r} begins at byte {entry.begin}, expected {position}: it {kind}")
        position = entry.end
    if data_start + position != file_bytes:
        kind = "truncated" if data_start + position > file_bytes else "longer than its tensors"
        _refuse(
            f"it is {kind}: expected {data_start + position} bytes by its header, got {file_bytes}"
        )
    return SafetensorsHeader(tensors, metadata, data_start)


def _load(text: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors and the metadata.

    Entries are parsed one by one and checked at once. One call of the parser for all of a large
    header would hold the interpreter for seconds, and so every other thread of the process.
    """
    if not text.startswith(b"{"):
        _refuse("its header is not a JSON object")
    try:
        header = text.decode("utf-8")
    except UnicodeDecodeError:
        _refuse("its header is not UTF-8")
    metadata: dict[str, str] = {}

    def metadata_string(name: str, start: int) -> tuple[str, int]:
        if header[start : start + 1] != '"':
            _refuse(f"its __metadata__ is not a map of strings: {name!r} is none")
        return _string(header, start)

    def member(name: str, start: int) -> tuple[TensorEntry | None, int]:
        if name == "__metadata__":
            if header[start : start + 1] != "{":
                _refuse("its __metadata__ is not a map of strings")
            strings, end = _members(header, start, member=metadata_string)
            metadata.update(strings)
            return None, end
        found, length = _parsed(header[start : start + MAX_ENTRY_CHARACTERS], 0)
        return _entry(name, found), start + length

    try:
        members, end = _members(header, 0, member=member)
    except (ValueError, RecursionError) as error:
        if isinstance(error, BlobRejected):
            raise
        _refuse(f"its header is not JSON, or a tensor's entry too long ({error})")
    if _spaced(header, end) != len(header):
        _refuse("its header is not JSON: something follows it")
    return {name: entry for name, entry in members.items() if entry is not None}, metadata


def _members(
    text: str, start: int, *, member: Callable[[str, int], tuple[Value, int]]
) -> tuple[dict[str, Value], int]:
    """Parse the JSON object at `start`, whose values `member` parses; return it and its end."""
    found: dict[str, Value] = {}
    position = _passed(text, start, "{")
    if text[position : position + 1] == "}":
        return found, position + 1
    while True:
        name, position = _string(text, position)
        if name in found:
            _refuse(f"its header has the name {name!r} twice")
        found[name], position = member(name, _passed(text, _spaced(text, position), ":"))
        position = _spaced(text, position)
        if text[position : position + 1] == "}":
            return found, position + 1
        position = _passed(text, position, ",")


def _passed(text: str, position: int, mark: str) -> int:
    """Return where the text goes on behind a mark and spaces."""
    if text[position : position + 1] != mark:
        _refuse(f"its header is not JSON: expected {mark!r}, got {text[position : position + 8]!r}")
    return _spaced(text, position + 1)


def _spaced(text: str, position: int) -> int:
    match = _SPACES.match(text, position)
    return position if match is None else match.end()


def _string(text: str, position: int) -> tuple[str, int]:
    if text[position : position + 1] != '"':
        _refuse(f"its header is not JSON: expected a string, got {text[position : position + 8]!r}")
    found, end = _parsed(text, position)
    return str(found), end


def _parsed(text: str, position: int) -> tuple[Any, int]:
    return _DECODER.raw_decode(text, position)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name in counts if counts[name] > 1)
        _refuse(f"its header has the name {twice!r} twice")
    return found


def _no_constant(name: str) -> NoReturn:
    _refuse(f"its header holds {name}, which is no JSON")


_SPACES: Final = re.compile(r"[ \t\n\r]*")
_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_without_duplicates, parse_constant=_no_constant
)


def _entry(name: str, found: Any) -> TensorEntry:
    if not isinstance(found, dict) or set(found) != {"dtype", "shape", "data_offsets"}:
        _refuse(f"tensor {name!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = found["dtype"], found["shape"], found["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        _refuse(f"tensor {name!r} has the dtype {dtype!r}, expected one of {sorted(DTYPE_BYTES)}")
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
        _refuse(f"tensor {name!r} has the shape {str(shape)[:80]}, expected sizes of 0 or more")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(f"tensor {name!r} has the data_offsets {str(offsets)[:80]}, expected [begin, end]")
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != expected:
        _refuse(
            f"tensor {name!r} of {dtype} and shape {shape} takes {expected} bytes, "
            f"its data_offsets give it {offsets[1] - offsets[0]}"
        )
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _naturals(found: Any) -> bool:
    """Tell whether this is a list of whole numbers from 0 to 2⁶³ − 1, and no booleans."""
    return isinstance(found, list) and all(
        type(size) is int and 0 <= size < 2**63 for size in found
    )


def _refuse(why: str) -> NoReturn:
    raise BlobRejected(f"not a valid safetensors file: {why}")
