"""Blobs: uploads, streamed to disk and checked before they count; one's own listed, deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated

import anyio.to_thread
from fastapi import Depends, HTTPException, Path, Query, Request, Response
from pydantic import BaseModel

from gradbox.errors import BlobTooLarge
from gradbox.protocol import BlobList, BlobView
from gradbox_service.accounting.blob_owners import OwnBlobs
from gradbox_service.admission.limits import check_memory
from gradbox_service.admission.quota import Quota, Taken
from gradbox_service.backing import Backing
from gradbox_service.cleaning.cleaner import Cleaner
from gradbox_service.http.allowances import transfer
from gradbox_service.http.auth import Box, Caller
from gradbox_service.http.bodies import announced_bytes
from gradbox_service.http.openapi import BLOB_BODY
from gradbox_service.http.routes import Router
from gradbox_service.identity.tokens import TokenInfo
from gradbox_service.settings import MIB, Settings
from gradbox_service.store import Upload

router = Router(prefix="/v1/blobs", tags=["blobs"])

# Written and hashed in a thread in pieces of this size: smaller ones cost throughput, and hashing
# on the event loop would halve it.
PIECE_BYTES = 4 * MIB
MAX_LISTED = 1000

Digest = Annotated[
    str,
    Path(pattern="^[0-9a-f]{64}$", description="The SHA-256 of the file in lower-case hexadecimal"),
]


class TakenBlob(BaseModel):
    digest: str
    size_bytes: int


@router.get("")
def list_blobs(
    box: Box,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = MAX_LISTED,
    cursor: Annotated[
        str | None, Query(max_length=64, description="`next` of the page before")
    ] = None,
) -> BlobList:
    """The caller's blobs, by digest, in pages. To list one is no use of it."""
    digests = sorted(d for d in box.owners.blobs_of(caller.name) if d > (cursor or ""))
    page = digests[:limit]
    uses = box.blobs.uses(page)
    return BlobList(
        blobs=[
            BlobView(digest=digest, size_bytes=uses[digest].size_bytes, used_s=uses[digest].used_s)
            for digest in page
            if digest in uses
        ],
        next=page[-1] if len(digests) > limit else None,
    )


@router.delete("/{digest}", status_code=204)
def delete_blob(digest: Digest, request: Request, caller: Caller) -> None:
    """Delete a blob of the caller's own; nothing happens where there is none (any more).

    It stays for others who have sent it too. 409 while a job that waits or runs needs it.
    """
    cleaner: Cleaner = request.app.state.cleaner
    cleaner.delete_blob(caller.name, digest)


@router.head("/{digest}", response_class=Response)
def has_blob(digest: Digest, box: Box, caller: Caller) -> Response:
    """200 if the caller has sent this blob before, 404 if not, whoever else has."""
    if _own(box, caller).size_bytes(digest) is None:
        raise HTTPException(404, f"no blob {digest} is on this box; upload it with PUT")
    return Response()


@router.put(
    "/{digest}",
    status_code=201,
    responses={
        200: {"model": TakenBlob, "description": "The caller had sent it before"},
        412: {"model": TakenBlob, "description": "Likewise, with `If-None-Match: *`"},
    },
    openapi_extra=BLOB_BODY,
    dependencies=[Depends(transfer)],
)
async def put_blob(
    digest: Digest, request: Request, response: Response, box: Box, caller: Caller
) -> TakenBlob:
    """Take a safetensors file whose SHA-256 is `digest`.

    A blob that only others have sent is written and checked like one that is not here: knowing a
    digest is not having the bytes. It then takes the place of the same file.
    """
    settings: Settings = request.app.state.settings
    pieces = _pieces(request, limit_bytes=settings.max_blob_bytes)
    size_bytes = await anyio.to_thread.run_sync(_own(box, caller).size_bytes, digest)
    if size_bytes is not None:
        async for _ in pieces:  # a client that is cut off while it sends may miss the answer
            pass
        not_again = request.headers.get("if-none-match", "").strip() == "*"
        response.status_code = 412 if not_again else 200
        return TakenBlob(digest=digest, size_bytes=size_bytes)
    await anyio.to_thread.run_sync(lambda: check_memory(box.records.memory()))
    said_bytes = announced_bytes(request)
    if said_bytes > settings.max_blob_bytes:
        raise _too_large(said_bytes, settings.max_blob_bytes)
    quota: Quota = request.app.state.quota
    with quota.taking(caller.name) as taken:
        await anyio.to_thread.run_sync(taken.cover, said_bytes)
        upload = await anyio.to_thread.run_sync(
            partial(box.blobs.upload, digest, announced_bytes=said_bytes)
        )
        with upload:
            await _write(upload, pieces, taken=taken)
            size_bytes = upload.size_bytes
            await anyio.to_thread.run_sync(upload.commit)
        await anyio.to_thread.run_sync(taken.claim, {digest: size_bytes})
    return TakenBlob(digest=digest, size_bytes=size_bytes)


def _own(box: Backing, caller: TokenInfo) -> OwnBlobs:
    return OwnBlobs(caller.name, blobs=box.blobs, owners=box.owners)


async def _pieces(request: Request, *, limit_bytes: int) -> AsyncIterator[list[bytes]]:
    """Yield the body in pieces of `PIECE_BYTES`, each as the chunks received.

    Raises:
        BlobTooLarge: there is more of it, or it says that there will be.
    """
    if announced_bytes(request) > limit_bytes:
        raise _too_large(announced_bytes(request), limit_bytes)
    piece: list[bytes] = []
    taken = yielded = 0
    async for chunk in request.stream():
        taken += len(chunk)
        if taken > limit_bytes:
            raise _too_large(taken, limit_bytes)
        piece.append(chunk)
        if taken - yielded >= PIECE_BYTES:
            yield piece
            piece, yielded = [], taken
    if piece:
        yield piece


async def _write(upload: Upload, pieces: AsyncIterator[list[bytes]], *, taken: Taken) -> None:
    """Write and hash each piece while the next one is received."""

    def write(piece: list[bytes]) -> None:
        taken.cover(upload.size_bytes + sum(map(len, piece)))
        upload.write(piece)

    writing: asyncio.Task[None] | None = None
    try:
        async for piece in pieces:
            if writing is not None:
                await writing
            writing = asyncio.create_task(anyio.to_thread.run_sync(write, piece))
    finally:
        if writing is not None:
            await writing  # also after an error: the file is closed next


def _too_large(found_bytes: int, limit_bytes: int) -> BlobTooLarge:
    return BlobTooLarge(
        f"the blob has {found_bytes} bytes or more, this box takes {limit_bytes}; cut the shards "
        "into several blobs"
    )
