"""A small result, which came with what the box said of its job: it never is a file here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradbox.errors import BlobRejected, ProtocolError
from gradbox.results.factor_checks import StoredTensor
from gradbox.results.result_files import beside, stored_tensors, tensor_of
from gradbox.results.rounded_tensors import rounded_tensors
from gradbox.tensors.safetensors_header import LENGTH_BYTES, header_length, parse_header


class HeldFile:
    """A result's bytes, and a copy in which its tensors lie; those that are widened lie apart.

    Raises:
        ProtocolError: they are not a safetensors file.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content  # `copy_to` writes it, whatever was written into a tensor
        self._of_tensors = bytearray(content)
        try:
            length = header_length(content[:LENGTH_BYTES], file_bytes=len(content))
            text = content[LENGTH_BYTES : LENGTH_BYTES + length]
            self._header = parse_header(text, file_bytes=len(content))
        except BlobRejected as error:
            raise ProtocolError(f"expected a result file of gradbox: {error}") from None
        self.metadata: Mapping[str, str] = self._header.metadata
        self._rounded = rounded_tensors(self.metadata)
        self.names = tuple(self._header.tensors)

    def __str__(self) -> str:
        return "the result that came with its job"

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        return stored_tensors(self._header)

    def tensor(self, name: str) -> Any:
        entry, start = self._header.tensors[name], self._header.data_start
        data = memoryview(self._of_tensors)[start + entry.begin : start + entry.end]
        return tensor_of(data, entry, shape=entry.shape, wider=self._rounded.get(name))

    def copy_to(self, path: Path) -> None:
        with beside(path) as written:
            written.write_bytes(self._content)
