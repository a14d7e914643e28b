"""Where a spec names tensors, and what they are by the headers of their blobs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from pydantic import BaseModel

from gradbox.errors import InvalidInputs, MissingBlobs
from gradbox.protocol import ShardRef, TensorRef, TracedFunction
from gradbox.tensors.safetensors_header import SafetensorsHeader, TensorEntry

References = Iterable[tuple[str, TensorRef]]
"""Each reference to a single tensor, with where in the spec it is named."""
# Opening a blob costs a file read here and a mapping in the worker.
MAX_BLOBS = 10_000
MAX_LISTED = 1000
FLOATING = frozenset({"F64", "F32", "F16", "BF16"})


def references(value: object, where: str = "") -> References:
    """Give each reference to a single tensor in a spec, or in the part of it that is `where`."""
    if isinstance(value, TensorRef):
        yield where, value
    elif isinstance(value, TracedFunction):  # its graph names none, and may be large
        yield from references(value.tensors, f"{where}.tensors")
    elif isinstance(value, BaseModel) and not isinstance(value, ShardRef):
        for name in type(value).model_fields:
            yield from references(getattr(value, name), f"{where}.{name}" if where else name)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from references(item, f"{where}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from references(item, f"{where}.{index}")


class Headers(Protocol):
    """The blobs that a job may name: `OwnBlobs`, or those that a client handed over."""

    def headers(self, digests: Collection[str]) -> Mapping[str, SafetensorsHeader]:
        """Return the headers of those of these blobs that are there, by digest."""


class TensorHeaders:
    """The headers of a job's blobs."""

    def __init__(self, headers: Mapping[str, SafetensorsHeader]) -> None:
        self._headers = headers

    @classmethod
    def load(cls, digests: Collection[str], *, blobs: Headers) -> TensorHeaders:
        """Read the headers of these blobs.

        Raises:
            MissingBlobs: the box lacks some of them.
            InvalidInputs: there are more than a job may name.
        """
        if len(digests) > MAX_BLOBS:
            raise InvalidInputs(
                f"the job names {len(digests)} blobs, at most {MAX_BLOBS} are allowed: put many "
                "shards into one blob, under different prefixes"
            )
        headers = blobs.headers(digests)
        missing = sorted(digest for digest in digests if digest not in headers)
        if missing:
            raise MissingBlobs(
                f"{len(missing)} of {len(digests)} blobs are not on this box, {missing[0]} for "
                "one: upload them with PUT /v1/blobs/{sha256}, then post the job again",
                missing=tuple(missing[:MAX_LISTED]),
            )
        return cls(headers)

    def entry(self, reference: TensorRef, *, where: str) -> TensorEntry:
        """Return the dtype and shape of one tensor.

        Raises:
            InvalidInputs: its blob has no tensor of that name.
        """
        found = self._headers[reference.blob].tensors.get(reference.tensor)
        if found is None:
            raise InvalidInputs(
                f"{where}: blob {reference.blob[:12]}… has no tensor {reference.tensor!r}; it has "
                f"{self._some(reference.blob)}"
            )
        return found

    def forms(self, reference: TensorRef | ShardRef) -> str:
        """Return names, dtypes and shapes of what a reference names, for comparison alone."""
        header = self._headers[reference.blob]
        if isinstance(reference, TensorRef):
            names, prefix = [reference.tensor], reference.tensor
        else:
            names, prefix = sorted(header.names_under(reference.prefix)), reference.prefix
        found = [(name.removeprefix(prefix), header.tensors[name]) for name in names]
        return " ".join(f"{name}:{entry.dtype}{list(entry.shape)}" for name, entry in found)

    def arguments(self, shard: ShardRef, *, where: str) -> list[str]:
        """Return the names of a shard's arguments, in no particular order.

        Raises:
            InvalidInputs: no tensor of the blob begins with the shard's prefix.
        """
        names = self._headers[shard.blob].names_under(shard.prefix)
        if not names:
            raise InvalidInputs(
                f"{where}: blob {shard.blob[:12]}… has no tensor whose name begins with "
                f"{shard.prefix!r}; it has {self._some(shard.blob)}"
            )
        return [name.removeprefix(shard.prefix) for name in names]

    def floating_arguments(self, shard: ShardRef, *, where: str) -> list[str]:
        """Return those of a shard's arguments that are floating-point; see `arguments`."""
        entries = self._headers[shard.blob].tensors
        names = self.arguments(shard, where=where)
        return [name for name in names if entries[shard.prefix + name].dtype in FLOATING]

    def _some(self, digest: str) -> str:
        names = sorted(self._headers[digest].tensors)
        return f"{names[:8]}{' and more' if len(names) > 8 else ''}"
