"""Where a result's tensors are read from: a file on this machine, bytes that came with the job, or
memory in which a job of this very process left them.

Gradients that lie in a file in 16 bits are given back in the dtype that they had on the box. The
file's metadata names them: {tensor: dtype before it was rounded}. docs/wire.md, "Gradients in 16
bits", states the form. Where there is no torch, bfloat16 is read from its bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from io import BytesIO
from itertools import islice
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, Self

import numpy as np

from gradbox.errors import BlobRejected, InvalidInputs, ProtocolError
from gradbox.results.factors import StoredTensor
from gradbox.tensors.lazy_tensor import array_of
from gradbox.tensors.safetensors_header import (
    SafetensorsHeader,
    TensorEntry,
    header_of,
    other_format,
)
from gradbox.tensors.tensor_bytes import DTYPES, is_torch_importable
from gradbox.written_files import beside

if TYPE_CHECKING:
    import torch

ROUNDED: Final = "gradbox_rounded"
WIDER: Final[Mapping[str, str]] = {"F32": "float32", "F64": "float64"}


def rounded_tensors(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Return the names of the tensors that were rounded, with the dtypes to give them back in.

    Raises:
        ProtocolError: the metadata's entry is not what docs/wire.md states.
    """
    text = metadata.get(ROUNDED)
    if text is None:
        return {}
    try:
        found = json.loads(text)
        return {str(name): WIDER[tag] for name, tag in found.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ProtocolError(
            f"expected rounded tensors with one of the dtypes {', '.join(WIDER)}, got "
            f"{text[:100]!r} ({type(error).__name__}: {error}); install a newer gradbox"
        ) from None


def widened(tensor: torch.Tensor | np.ndarray[Any, Any], dtype: str) -> Any:
    """Return a copy in a wider dtype, as torch and NumPy both spell it."""
    if isinstance(tensor, np.ndarray):
        return tensor.astype(dtype)
    import torch

    return tensor.to(getattr(torch, dtype))


def bfloat16_array(
    data: bytes | bytearray | memoryview, shape: tuple[int, ...], dtype: str
) -> np.ndarray[Any, Any]:
    """Return bfloat16 numbers in a wider dtype: their bits are the upper half of float32's."""
    upper = np.frombuffer(data, dtype="<u2").astype(np.uint32) << np.uint32(16)
    return upper.view(np.float32).astype(dtype, copy=False).reshape(shape)


_TAGS: Final = {name: tag for name, (tag, _) in DTYPES.items()}
_NAMES: Final = {tag: name for name, tag in _TAGS.items()}


class ResultFile(Protocol):
    """A safetensors file of a result."""

    metadata: Mapping[str, str]
    names: tuple[str, ...]

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """What the file's header says of every tensor."""

    def tensor(self, name: str) -> Any:
        """Return a tensor, whose memory is read as it is used; one that was rounded is widened."""

    def copy_to(self, path: Path) -> None:
        """Write the file to `path`, whole or not at all."""


class ReadInPlace:
    """A file that stays where it is: copies of a result share it, and it is not pickled."""

    def __deepcopy__(self, memo: object) -> Self:
        return self  # nothing writes to it

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InvalidInputs(
            f"expected a result to stay in its process, got one to be pickled, with its file "
            f"{self}: result.save(path), and GradResult.load(path) where it is needed"
        )


def stored_tensors(header: SafetensorsHeader) -> dict[str, StoredTensor]:
    """Return what a file's header says of every tensor."""
    entries = header.tensors.items()
    return {name: StoredTensor(entry.dtype, entry.shape) for name, entry in entries}


def tensor_of(
    data: bytearray | memoryview, entry: TensorEntry, *, shape: tuple[int, ...], wider: str | None
) -> Any:
    """Return a tensor, or the part of that shape, of its bytes in a file.

    Args:
        wider: the dtype that it had before it was rounded; None if it was not.
    """
    if wider is not None and entry.dtype == "BF16" and not is_torch_importable():
        return bfloat16_array(data, shape, wider)
    found = array_of(data, dtype=dtype_name(entry), shape=shape)
    return found if wider is None else widened(found, wider)


def dtype_name(entry: TensorEntry) -> str:
    """Return the name of a stored tensor's dtype.

    Raises:
        ProtocolError: none of ours has its tag.
    """
    if entry.dtype not in _NAMES:
        raise ProtocolError(f"expected tensors of {', '.join(_NAMES)}, got {entry.dtype}")
    return _NAMES[entry.dtype]


def no_such_tensor(name: object, *, section: str, names: Collection[str]) -> KeyError:
    """Return the error that says which names a section of a result has."""
    asked_for = repr(name) if isinstance(name, str) else f"a {type(name).__name__}"
    if not names:
        found = f"{section}: this result holds none, so none is named {asked_for}"
        if section == "grads":  # which are asked for by default
            return KeyError(
                f"{found}; a Forward has .outputs, reduced rows .norms(), .gram() and such"
            )
        asked = "buffers" if section == "loss_buffers" else section
        return KeyError(f"{found}; a Gradient brings them where returns has {asked!r}")
    first = ", ".join(map(repr, islice(names, 3)))
    return KeyError(
        f"{section}: {asked_for} is none of its {len(names)} names, which begin {first}"
    )


class HeldTensors(ReadInPlace):
    """A result that was computed in this process, and never was a file.

    Args:
        tensors: as a result file has them, SECTION/NAME, on the CPU.
        metadata: as a result file has it.

    Attributes:
        job: what is kept of the job for others that go on from it, for as long as this lives.
    """

    job: object = None

    def __init__(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        self._tensors = dict(tensors)
        self.metadata = metadata
        self._rounded = rounded_tensors(metadata)
        self.names = tuple(self._tensors)

    def __str__(self) -> str:
        return "the result that this process computed"

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        return {
            name: StoredTensor(_TAGS[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def tensor(self, name: str) -> Any:
        tensor = self._tensors[name]
        return widened(tensor, self._rounded[name]) if name in self._rounded else tensor

    def copy_to(self, path: Path) -> None:
        from safetensors.torch import save_file

        with beside(path) as written:
            save_file(self._tensors, written, metadata=dict(self.metadata))


class _FileInMemory:
    """A file whose bytes are in memory, or mapped there; tensors that are widened lie apart."""

    def __init__(self, data: bytearray | mmap, header: SafetensorsHeader) -> None:
        self._data, self._header = data, header
        self.metadata = header.metadata
        self._rounded = rounded_tensors(self.metadata)
        self.names = tuple(header.tensors)

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        return stored_tensors(self._header)

    def tensor(self, name: str) -> Any:
        entry, start = self._header.tensors[name], self._header.data_start
        data = memoryview(self._data)[start + entry.begin : start + entry.end]
        return tensor_of(data, entry, shape=entry.shape, wider=self._rounded.get(name))


class LocalFile(ReadInPlace, _FileInMemory):
    """A result on this machine, mapped: its tensors take memory as they are read.

    What is written to a tensor stays in this process.

    Raises:
        FileNotFoundError: there is no such file.
        ProtocolError: it is not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            try:
                header = header_of(file)
            except BlobRejected as error:
                got = other_format(path) or f"one that is not ({error})"
                raise ProtocolError(
                    f"{path}: expected a result file of gradbox, got {got}"
                ) from None
            super().__init__(mmap(file.fileno(), 0, access=ACCESS_COPY), header)

    def __str__(self) -> str:
        return str(self._path)

    def copy_to(self, path: Path) -> None:
        with beside(path) as written:
            shutil.copyfile(self._path, written)


class HeldFile(_FileInMemory):
    """A result's bytes, and a copy in which its tensors lie.

    Raises:
        ProtocolError: they are not a safetensors file.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content  # `copy_to` writes it, whatever was written into a tensor
        try:
            header = header_of(BytesIO(content))
        except BlobRejected as error:
            raise ProtocolError(f"expected a result file of gradbox: {error}") from None
        super().__init__(bytearray(content), header)

    def __str__(self) -> str:
        return "the result that came with its job"

    def copy_to(self, path: Path) -> None:
        with beside(path) as written:
            written.write_bytes(self._content)
