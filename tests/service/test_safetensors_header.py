"""The header parser takes what safetensors writes and nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from gradbox.errors import BlobRejected
from gradbox.tensors.safetensors_header import (
    MAX_HEADER_BYTES,
    SafetensorsHeader,
    TensorEntry,
    parse_header,
    read_header,
)
from tests.service.boxes import ones


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def read(tmp_path: Path, data: bytes) -> Any:
    path = tmp_path / "file"
    path.write_bytes(data)
    return read_header(path)


def header_with(names: list[str]) -> SafetensorsHeader:
    return SafetensorsHeader({name: TensorEntry("F32", (0,), 0, 0) for name in names}, {}, 8)


@settings(deadline=None)
@given(names=st.lists(st.text("ab/\U0010ffff", max_size=4), unique=True), prefix=st.text("ab/"))
def test_the_names_under_a_prefix_come_in_the_order_of_the_file(
    names: list[str], prefix: str
) -> None:
    expected = [name for name in names if name.startswith(prefix)]
    assert header_with(names).names_under(prefix) == expected


def test_a_shard_of_many_costs_a_search_and_not_a_look_at_every_name() -> None:
    class Counted(str):
        looks = 0

        def startswith(self, *given: Any) -> bool:
            Counted.looks += 1
            return super().startswith(*given)

    header = header_with([Counted(f"z/{number}/x") for number in range(1000)])
    for number in range(1000):
        assert header.names_under(f"z/{number}/") == [f"z/{number}/x"]
    assert Counted.looks <= 2000


WHOLE = save({"a": ones(2, 3), "b": np.arange(4), "empty": ones(0, 5), "scalar": np.array(1.5)})
BAD: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "0 bytes"),
    "seven bytes": (b"\0" * 7, "7 bytes"),
    "truncated data": (WHOLE[:-1], "truncated"),
    "truncated header": (WHOLE[:30], "ends after 30"),
    "extended": (WHOLE + b"\0", "longer than its tensors"),
    "huge header": ((2**63).to_bytes(8, "little") + b"{}", str(MAX_HEADER_BYTES)),
    "header past the end": ((1000).to_bytes(8, "little") + b"{}", "ends after 10"),
    "no JSON": (file_of(b"{'a': 1}"), "not JSON"),
    "a JSON list": (file_of(b"[]"), "not a JSON object"),
    "leading space": (file_of(b" {}"), "not a JSON object"),
    "no UTF-8": (file_of(b'{"\xff\xfe": 1}'), "not UTF-8"),
    "deep nesting": (file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "not JSON"),
    "a number of 5000 digits": (file_of(b'{"a":' + b"9" * 5000 + b"}"), "exactly"),
    "an endless shape": (
        file_of(b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[' + b"0," * 9999 + b"0]}}"),
        "too long",
    ),
    "something behind": (file_of(b'{"__metadata__":{}} {}'), "something follows"),
    "a comma at the end": (file_of(b'{"__metadata__":{},}'), "expected a string"),
    "NaN": (file_of(b'{"a": NaN}'), "NaN"),
    "name twice": (
        file_of(b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": 2}'),
        "'a' twice",
    ),
    "metadata twice": (file_of(b'{"__metadata__": {}, "__metadata__": {}}'), "twice"),
    "overlap": (file_of({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, b"\0" * 8), "overlaps"),
    "gap": (file_of({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"\0" * 12), "gap"),
    "does not begin at 0": (file_of({"a": entry([1], 4, 8)}, b"\0" * 8), "gap"),
    "negative shape": (file_of({"a": entry([-1, -1], 0, 4)}, b"\0" * 4), "shape"),
    "fractional shape": (file_of({"a": entry([1.0], 0, 4)}, b"\0" * 4), "shape"),
    "boolean shape": (file_of({"a": entry([True], 0, 4)}, b"\0" * 4), "shape"),
    "shape is no list": (file_of({"a": entry("1", 0, 4)}, b"\0" * 4), "shape"),
    "overflowing shape": (file_of({"a": entry([2**62, 8], 0, 0)}), "takes"),
    "size above 2⁶³": (file_of({"a": entry([2**63], 0, 0)}), "shape"),
    "shape and offsets disagree": (file_of({"a": entry([2], 0, 4)}, b"\0" * 4), "takes 8 bytes"),
    "backward offsets": (file_of({"a": entry([1], 4, 0)}, b"\0" * 4), "data_offsets"),
    "negative offsets": (file_of({"a": entry([1], -4, 0)}, b"\0" * 4), "data_offsets"),
    "three offsets": (
        file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, b"\0" * 4),
        "data_offsets",
    ),
    "unknown dtype": (file_of({"a": entry([1], 0, 4, "OBJECT")}, b"\0" * 4), "dtype"),
    "dtype is no string": (file_of({"a": entry([1], 0, 4, ["F32"])}, b"\0" * 4), "dtype"),
    "unknown field": (file_of({"a": entry([1], 0, 4) | {"pickle": 1}}, b"\0" * 4), "exactly"),
    "missing field": (file_of({"a": {"dtype": "F32", "shape": []}}, b"\0" * 4), "exactly"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "map of strings"),
}


@pytest.mark.parametrize(("data", "why"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_refused_with_its_reason(tmp_path: Path, data: bytes, why: str) -> None:
    with pytest.raises(BlobRejected, match="not a valid safetensors file") as raised:
        read(tmp_path, data)
    assert why in str(raised.value)


def test_what_safetensors_writes_is_read(tmp_path: Path) -> None:
    header = read(tmp_path, WHOLE)
    assert {name: (e.dtype, e.shape) for name, e in header.tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("I64", (4,)),
        "empty": ("F32", (0, 5)),
        "scalar": ("F64", ()),
    }
    found = header.tensors["a"]
    begin, end = header.data_start + found.begin, header.data_start + found.end
    assert np.array_equal(np.frombuffer(WHOLE[begin:end], np.float32), np.ones(6, np.float32))


def test_metadata_is_returned(tmp_path: Path) -> None:
    data = save({"a": ones(1)}, metadata={"gradbox": "{}"})
    assert read(tmp_path, data).metadata == {"gradbox": "{}"}


def test_a_file_without_tensors_is_whole(tmp_path: Path) -> None:
    assert read(tmp_path, file_of({})).tensors == {}


SIZES = st.integers(-1, 3)
ENTRIES = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.builds(
        entry,
        st.lists(SIZES, max_size=2),
        st.integers(0, 16),
        st.integers(0, 16),
        st.sampled_from(["F32", "U8", "I16", "X"]),
    ),
)


@settings(max_examples=300, deadline=None)
@given(ENTRIES, st.integers(0, 24))
def test_it_never_takes_what_safetensors_refuses(header: Any, num_bytes: int) -> None:
    data = file_of(header, b"\0" * num_bytes)
    try:
        parse_header(data[8 : len(data) - num_bytes], file_bytes=len(data))
    except BlobRejected:
        return
    deserialize(data)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=4), st.integers(-3, 3))
def test_it_takes_what_safetensors_takes(shapes: Any, extra: int) -> None:
    header, end = {}, 0
    for index, shape in enumerate(shapes):
        begin, end = end, end + 4 * math.prod(shape)
        header[str(index)] = entry(shape, begin, end)
    data = file_of(header, b"\0" * max(0, end + extra))
    try:
        deserialize(data)
    except SafetensorError:
        with pytest.raises(BlobRejected):
            parse_header(json.dumps(header).encode(), file_bytes=len(data))
    else:
        found = parse_header(json.dumps(header).encode(), file_bytes=len(data))
        assert len(found.tensors) == len(shapes)
