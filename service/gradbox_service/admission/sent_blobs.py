"""Blobs that come in one body with the job that names them: taken as `PUT /v1/blobs` takes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from gradbox.errors import BlobRejected, BlobTooLarge
from gradbox_service.admission.quota import Quota
from gradbox_service.backing import Backing
from gradbox_service.settings import Settings


def take_blobs(
    blobs: Mapping[str, bytes], *, owner: str, box: Backing, quota: Quota, settings: Settings
) -> None:
    """Store what the owner has not sent before; from then on it is theirs.

    Args:
        blobs: digest → the bytes that came under it.

    Raises:
        BlobRejected: the bytes have another digest, or are no whole safetensors file.
        BlobTooLarge: one is larger than a blob may be, or all exceed the quota by themselves.
        StorageFull: they exceed the owner's quota, or the disk does not hold them.
    """
    for digest, content in blobs.items():
        _check(digest, content, limit_bytes=settings.max_blob_bytes)
    stored = [digest for digest in blobs if box.blobs.size_bytes(digest) is not None]
    owned = box.owners.owned_among(owner, stored)
    new = {digest: content for digest, content in blobs.items() if digest not in owned}
    if not new:
        return
    sizes_bytes = {digest: len(content) for digest, content in new.items()}
    with quota.taking(owner) as taken:
        taken.cover(sum(sizes_bytes.values()))
        for digest, content in new.items():
            box.blobs.put(digest, [content])
        taken.claim(sizes_bytes)


def _check(digest: str, content: bytes, *, limit_bytes: int) -> None:
    if len(content) > limit_bytes:
        raise BlobTooLarge(
            f"blob {digest[:12]}… has {len(content)} bytes, this box takes {limit_bytes}; cut the "
            "shards into several blobs"
        )
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise BlobRejected(
            f"the {len(content)} bytes that came with the job have the SHA-256 {found}, expected "
            f"{digest}; send them again, and if it repeats, compute the digest anew"
        )
