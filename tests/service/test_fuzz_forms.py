"""1,550 forms, random or nearly right: each is refused as documented, or taken exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradbox.errors import InvalidJob
from gradbox_service.http.bodies import read_parts
from gradbox_service.settings import Settings
from tests.service.conftest import Box, serve
from tests.service.test_one_trip import BOUNDARY, DATA, DIGEST, form, job_part, post
from tests.valkey import empty_backing

CONTENT_TYPE = f"multipart/form-data; boundary={BOUNDARY}"
NAMES = st.one_of(
    st.sampled_from(["job", DIGEST, DIGEST.upper(), "f" * 64, "", 'a"b', "é"]), st.text(max_size=5)
)
CONTENTS = st.one_of(
    st.sampled_from([DATA, job_part()[1], b"{}", f"\r\n--{BOUNDARY}".encode()]),
    st.binary(max_size=60),
)
PARTS = st.lists(st.tuples(NAMES, CONTENTS), max_size=4)
CHANGES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4)
RIGHT = form([job_part(), (DIGEST, DATA)])


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Return a form of odd parts, or the right one with some bytes changed, cut or doubled."""
    if draw(st.booleans()):
        return form(draw(PARTS))
    found = bytearray(RIGHT)
    for place, value in draw(CHANGES):
        found[place % len(found)] = value
    start, stop = draw(st.integers(0, len(found))), draw(st.integers(0, len(found)))
    return bytes(found[:stop] + found[start:])


@given(st.binary(max_size=300), st.lists(st.binary(max_size=20), max_size=6))
@settings(max_examples=400, deadline=None)
def test_contents_come_back_as_they_were(job: bytes, contents: list[bytes]) -> None:
    blobs = {hashlib.sha256(content).hexdigest(): content for content in contents}
    boundary = hashlib.sha256(job + b"".join(contents)).hexdigest()
    body = form([("job", job), *blobs.items()], boundary=boundary)
    parts = read_parts(body, content_type=f"multipart/form-data; boundary={boundary}")
    assert (parts.job, parts.blobs) == (job, blobs)


@given(bodies(), st.sampled_from([CONTENT_TYPE, CONTENT_TYPE[:-1], "multipart/form-data;boundary"]))
@settings(max_examples=1000, deadline=None)
def test_a_form_is_read_or_refused(body: bytes, content_type: str) -> None:
    try:
        parts = read_parts(body, content_type=content_type)
    except InvalidJob:
        return
    assert all(len(name) == 64 for name in parts.blobs)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    folder = tmp_path_factory.mktemp("fuzzed")
    yield from serve(empty_backing(folder / "data"), Settings(data=folder / "data"))


@given(body=bodies())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_posted_form_is_never_an_error_of_the_box(fuzzed: Box, body: bytes) -> None:
    answer = post(fuzzed.client, body)
    assert answer.status_code in (202, 413, 422, 429), answer.text
    stored = [path for path in _blobs(fuzzed) if path.is_file()]
    assert all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in stored)


def _blobs(box: Box) -> list[Path]:
    return [box.backing.blobs.path(digest) for digest, _ in box.backing.blobs.files()]
