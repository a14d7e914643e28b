"""Bodies of several parts: a job and the small blobs that it names, in one request.

The form is that of multipart/form-data (RFC 7578), which `curl -F` sends. The part named `job` is
what `POST /v1/jobs` takes alone; every other part is a blob, named by its digest. Nothing is taken
from a part's other headers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from gradbox.errors import InvalidJob
from gradbox_service.settings import MIB

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FORM: Final = "multipart/form-data"
JOB: Final = "job"
# A job and its blobs, with what is between them.
MAX_BODY_BYTES: Final = MIB
# The parser has a limit of its own for each header: this one bounds what a body makes us keep.
MAX_PARTS: Final = 257
DIGEST: Final = re.compile(r"[0-9a-f]{64}")
EXPECTED: Final = (
    f"a {FORM} body: expected one part named {JOB!r} and others named by the SHA-256 of the blob "
    "that they are, as docs/wire.md has it"
)


@dataclass(frozen=True)
class Parts:
    """A posted job, and the blobs that came with it by their digests, which nobody has verified."""

    job: bytes
    blobs: Mapping[str, bytes]


def is_form(content_type: str) -> bool:
    """Tell whether a body has several parts, by its Content-Type."""
    return content_type.partition(";")[0].strip().lower() == FORM


def read_parts(body: bytes, *, content_type: str) -> Parts:
    """Read a body that is whole.

    Raises:
        InvalidJob: it is not of the form that is expected.
    """
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise InvalidJob(f"{EXPECTED}; got a Content-Type without a boundary")
    reader = _Reader()
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidJob(f"{EXPECTED}; got one that cannot be parsed: {error}") from None
    if not reader.ended:
        raise InvalidJob(f"{EXPECTED}; got one without its closing boundary")
    job = reader.parts.pop(JOB, None)
    if job is None:
        raise InvalidJob(f"{EXPECTED}; got no part named {JOB!r}")
    return Parts(job, reader.parts)


class _Reader:
    """Gathers the parts as the parser finds their bounds."""

    def __init__(self) -> None:
        self.parts: dict[str, bytes] = {}
        self.ended = False
        self._field = bytearray()
        self._value = bytearray()
        self._name = ""
        self._content = bytearray()

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": lambda data, start, end: self._content.extend(data[start:end]),
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def _on_part_begin(self) -> None:
        if len(self.parts) >= MAX_PARTS:
            raise InvalidJob(
                f"{EXPECTED}; got more than {MAX_PARTS} parts: upload blobs with PUT "
                "/v1/blobs/{sha256}"
            )
        self._name, self._content = "", bytearray()

    def _on_header_end(self) -> None:
        if bytes(self._field).lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._name = options.get(b"name", b"").decode("latin-1")
        self._field, self._value = bytearray(), bytearray()

    def _on_headers_finished(self) -> None:
        if self._name != JOB and not DIGEST.fullmatch(self._name):
            raise InvalidJob(f"{EXPECTED}; got a part named {self._name[:80]!r}")
        if self._name in self.parts:
            raise InvalidJob(f"{EXPECTED}; got two parts named {self._name!r}")

    def _on_part_end(self) -> None:
        self.parts[self._name] = bytes(self._content)

    def _on_end(self) -> None:
        self.ended = True
