"""Bytes from the other side, random or nearly right: only the documented errors come of them."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from gradbox import GradResult, JobEvent, JobState, ProtocolError
from gradbox.errors import BlobRejected
from gradbox.http.events import read_events
from gradbox.tensors.safetensors_header import header_length, parse_header, read_header
from tests.client.wires import job_view

QUICK = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))

FILE = save({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.int64)}, {"key": "value"})
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-1, 50), max_size=3),
    st.sampled_from(["F32", "I64", "C64", "F4"]),
)
ENTRIES = st.one_of(
    VALUES,
    st.dictionaries(
        st.sampled_from(["dtype", "shape", "data_offsets", "more"]), VALUES, max_size=4
    ),
)
HEADERS = st.dictionaries(
    st.one_of(st.sampled_from(["a", "b", "__metadata__"]), st.text(max_size=3)), ENTRIES, max_size=3
)


def cut(content: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({0, len(content), *(place % (len(content) + 1) for place in places)})
    return [content[start:stop] for start, stop in pairwise(ends)]


def changed(content: bytes, changes: list[tuple[int, int]]) -> bytes:
    found = bytearray(content)
    for place, value in changes:
        found[place % len(found)] = value
    return bytes(found)


CHANGES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=5)


@QUICK
@given(st.one_of(st.binary(max_size=100), st.builds(changed, st.just(FILE), CHANGES)))
def test_a_file_is_one_or_is_refused(content: bytes) -> None:
    try:
        length = header_length(content[:8], file_bytes=len(content))
        header = parse_header(content[8 : 8 + length], file_bytes=len(content))
    except BlobRejected:
        return
    assert header.data_start + sum(e.end - e.begin for e in header.tensors.values()) == len(content)


@QUICK
@given(HEADERS, st.integers(0, 60))
def test_a_header_of_any_json_is_one_or_is_refused(document: Any, data_bytes: int) -> None:
    text = json.dumps(document).encode()
    with suppress(BlobRejected):
        parse_header(text, file_bytes=8 + len(text) + data_bytes)


@settings(QUICK, max_examples=100)
@given(changes=CHANGES, kept=st.integers(0, 400))
def test_a_result_file_is_one_or_is_a_protocol_error(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], kept: int
) -> None:
    path = tmp_path_factory.mktemp("fuzz", numbered=True) / "result.safetensors"
    path.write_bytes(changed(FILE, changes)[: kept or None])
    with pytest.raises(ProtocolError):  # it has no receipt in any case
        GradResult.load(path)


@pytest.mark.parametrize("length", [0, 1, 2**24 + 1, 2**63, 2**64 - 1])
def test_a_header_as_long_as_it_likes_is_refused(length: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(BlobRejected):
        read_header(path)


STATE = job_view(JobState.RUNNING).model_dump_json()
FIELDS = st.sampled_from(
    [b"event: state", b"event: progress", b"event: news", b"event", b"id: 1-0", b"id: \0", b"id",
     b"data: {}", f"data: {STATE}".encode(), b'data: {"phase": "p", "done": 1, "total": 2}',
     b"data", b"data: " + b"[" * 5000, b": comment", b"retry: soon", b"retry: " + b"9" * 5000,
     b"\xff\xfe", "data: \u2028\x85".encode(), b"\xef\xbb\xbfdata: x", b"", b"", b""]
)  # fmt: skip
STREAMS = st.one_of(
    st.binary(max_size=60),
    st.lists(st.tuples(FIELDS, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=12).map(
        lambda lines: b"".join(line + end for line, end in lines)
    ),
)


def events_of(chunks: list[bytes]) -> list[JobEvent] | str:
    try:
        return list(read_events(iter(chunks)))
    except ProtocolError as error:
        return str(error)


@QUICK
@given(STREAMS, st.lists(st.integers(0, 10**6), max_size=5))
def test_a_stream_is_events_or_a_protocol_error_however_it_is_cut(
    content: bytes, places: list[int]
) -> None:
    whole = events_of([content])
    assert events_of(cut(content, places)) == whole
    assert isinstance(whole, str) or all(event.kind in ("state", "progress") for event in whole)


def test_line_ends_of_unicode_end_no_line_of_a_stream() -> None:
    view = job_view().model_copy(update={"name": "a\u2028b\x85c\x0bd"})
    content = f"event: state\ndata: {view.model_dump_json()}\n\n".encode()
    (event,) = read_events([content])
    assert event.job == view
