"""Uploads of blobs, streamed to disk and checked before they count."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, HTTPException, Path, Request, Response
from pydantic import BaseModel

from gradbox.errors import BlobTooLarge
from gradbox_service.http.auth import Box, Owner
from gradbox_service.http.openapi import BLOB_BODY
from gradbox_service.settings import MIB, Settings
from gradbox_service.store import BlobStore

router = APIRouter(prefix="/v1/blobs", tags=["blobs"])

# Written and hashed in a thread in pieces of this size: smaller ones cost throughput, and hashing
# on the event loop would halve it.
PIECE_BYTES = 4 * MIB

Digest = Annotated[
    str,
    Path(pattern="^[0-9a-f]{64}$", description="The SHA-256 of the file in lower-case hexadecimal"),
]


class BlobView(BaseModel):
    digest: str
    size_bytes: int


@router.head("/{digest}")
def has_blob(digest: Digest, box: Box, owner: Owner) -> Response:
    """200 if the box has the blob, 404 if not."""
    if box.blobs.size_bytes(digest) is None:
        raise HTTPException(404, f"no blob {digest} is on this box; upload it with PUT")
    return Response()


@router.put(
    "/{digest}",
    status_code=201,
    responses={200: {"description": "It was here already"}},
    openapi_extra=BLOB_BODY,
)
async def put_blob(
    digest: Digest, request: Request, response: Response, box: Box, owner: Owner
) -> BlobView:
    """Take a safetensors file whose SHA-256 is `digest`."""
    settings: Settings = request.app.state.settings
    pieces = _pieces(request, limit_bytes=settings.max_blob_bytes)
    size_bytes = await anyio.to_thread.run_sync(box.blobs.size_bytes, digest)
    if size_bytes is not None:
        async for _ in pieces:  # a client that is cut off while it sends may miss the answer
            pass
        response.status_code = 200
        return BlobView(digest=digest, size_bytes=size_bytes)
    size_bytes = await _store(box.blobs, digest, pieces, announced_bytes=_announced_bytes(request))
    return BlobView(digest=digest, size_bytes=size_bytes)


async def _store(
    blobs: BlobStore, digest: str, pieces: AsyncIterator[bytearray], *, announced_bytes: int
) -> int:
    begin = partial(blobs.upload, digest, announced_bytes=announced_bytes)
    upload = await anyio.to_thread.run_sync(begin)
    with upload:
        async for piece in pieces:
            await anyio.to_thread.run_sync(upload.write, piece)
        await anyio.to_thread.run_sync(upload.commit)
    return upload.size_bytes


async def _pieces(request: Request, *, limit_bytes: int) -> AsyncIterator[bytearray]:
    """Yield the body in pieces of `PIECE_BYTES`.

    Raises:
        BlobTooLarge: there is more of it, or it says that there will be.
    """
    if _announced_bytes(request) > limit_bytes:
        raise _too_large(_announced_bytes(request), limit_bytes)
    piece, taken = bytearray(), 0
    async for chunk in request.stream():
        taken += len(chunk)
        if taken > limit_bytes:
            raise _too_large(taken, limit_bytes)
        piece += chunk
        if len(piece) >= PIECE_BYTES:
            yield piece
            piece = bytearray()
    if piece:
        yield piece


def _too_large(found_bytes: int, limit_bytes: int) -> BlobTooLarge:
    return BlobTooLarge(
        f"the blob has {found_bytes} bytes or more, this box takes {limit_bytes}; cut the shards "
        "into several blobs"
    )


def _announced_bytes(request: Request) -> int:
    """Return the Content-Length; 0 for a body that comes in chunks."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() else 0
