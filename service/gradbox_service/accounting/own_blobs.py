"""The box's blobs as one owner sees them: what others sent is not there."""

from __future__ import annotations

from collections.abc import Collection

from gradbox.tensors.safetensors_header import SafetensorsHeader
from gradbox_service.accounting.blob_owners import BlobOwners
from gradbox_service.store import BlobStore


class OwnBlobs:
    """The blobs whose bytes `owner` has sent."""

    def __init__(
        self, owner: str, *, blobs: BlobStore, owners: BlobOwners, sent: Collection[str] = ()
    ) -> None:
        """Ask nothing yet.

        Args:
            sent: blobs that the owner is known to have sent: they came with this request.
        """
        self._owner = owner
        self._blobs = blobs
        self._owners = owners
        self._sent = frozenset(sent)

    def headers(self, digests: Collection[str]) -> dict[str, SafetensorsHeader]:
        """Return the headers of those blobs that are here."""
        asked = [digest for digest in digests if digest not in self._sent]
        owned = self._owners.owned_among(self._owner, asked) | self._sent.intersection(digests)
        headers = {digest: self._blobs.header(digest) for digest in owned}
        return {digest: header for digest, header in headers.items() if header is not None}

    def size_bytes(self, digest: str) -> int | None:
        """Return the blob's size, or None if it is not here."""
        owned = digest in self._sent or self._owners.owns(self._owner, digest)
        return self._blobs.size_bytes(digest) if owned else None
