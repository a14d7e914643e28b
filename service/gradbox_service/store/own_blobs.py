"""The box's blobs as one owner sees them: what others sent is not there."""

from __future__ import annotations

from collections.abc import Collection

from gradbox.tensors.safetensors_header import SafetensorsHeader
from gradbox_service.store.blobs import BlobStore
from gradbox_service.store.owners import BlobOwners


class OwnBlobs:
    """The blobs whose bytes `owner` has sent."""

    def __init__(self, owner: str, *, blobs: BlobStore, owners: BlobOwners) -> None:
        self._owner = owner
        self._blobs = blobs
        self._owners = owners

    def headers(self, digests: Collection[str]) -> dict[str, SafetensorsHeader]:
        """Return the headers of those blobs that are here."""
        headers = {}
        for digest in sorted(self._owners.owned_among(self._owner, digests)):
            header = self._blobs.header(digest)
            if header is not None:
                headers[digest] = header
        return headers

    def size_bytes(self, digest: str) -> int | None:
        """Return the blob's size, or None if it is not here."""
        owned = self._owners.owns(self._owner, digest)
        return self._blobs.size_bytes(digest) if owned else None
