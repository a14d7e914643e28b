"""Gradient stores: rows that stay on the box, appended and queried by jobs."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Depends, Path, Query, Request, Response
from fastapi.responses import FileResponse

from gradbox.errors import StoreConflict, StoreNotFound
from gradbox.protocol import Grants, StoreList, StoreView
from gradbox_service.admission.posting import Admission, Sent
from gradbox_service.admission.stores import listed, make_store, post_on_store, visible
from gradbox_service.cleaning.cleaner import Cleaner
from gradbox_service.database.conditional_commands import until_current
from gradbox_service.http.allowances import transfer
from gradbox_service.http.auth import Box, Caller, Credentials
from gradbox_service.http.openapi import STORE_REQUEST, any_of, posts_a_job, with_blobs
from gradbox_service.http.routes import Router
from gradbox_service.http.routes.jobs import take_job, take_spec
from gradbox_service.identity.tokens import TokenInfo
from gradbox_service.stores.record import StoreRecord

router = Router(prefix="/v1/stores", tags=["stores"])


@router.post("", status_code=201, response_model=StoreView, openapi_extra=STORE_REQUEST)
async def post_store(request: Request, credentials: Credentials) -> StoreView:
    """Make a store, or find the one of that name that is made in the same way."""

    def make(body: bytes, sent: Sent, at: Admission) -> StoreView:
        return _view(make_store(body, sent=sent, at=at), sent.caller)

    return await take_spec(request, credentials, make)


@router.get("")
def list_stores(
    box: Box, caller: Caller, name: Annotated[str | None, Query(max_length=400)] = None
) -> StoreList:
    """The stores that the caller may read, newest first; `name` is NAME or OWNER/NAME."""
    return StoreList(stores=listed(caller=caller, box=box, name=name))


@router.get("/{store_id}")
def one_store(store_id: str, box: Box, caller: Caller) -> StoreView:
    """One store."""
    return _view(visible(store_id, caller=caller, box=box), caller)


@router.delete("/{store_id}", status_code=204)
def remove_store(store_id: str, request: Request, box: Box, caller: Caller) -> None:
    """Delete a store with its rows; nothing happens where there is none (any more).

    409 while a job appends to it or queries it.
    """
    cleaner: Cleaner = request.app.state.cleaner

    def remove() -> None:
        try:
            store = visible(store_id, caller=caller, box=box, to_write=True)
        except StoreNotFound:
            if box.stores.get(store_id) is None:
                return
            raise
        if store.id in cleaner.needed():
            raise StoreConflict("a job appends to the store or queries it: wait for its end")
        box.stores.forget(store)
        box.stores.files.remove(store.id)

    until_current(remove)


@router.put("/{store_id}/grants")
def put_grants(store_id: str, grants: Grants, box: Box, caller: Caller) -> StoreView:
    """Let these people read a store, "*" being everybody, and nobody else."""
    store = visible(store_id, caller=caller, box=box, to_write=True)
    after = box.stores.change(store.id, lambda record: record.granted(grants.grants))
    return _view(after or store, caller)


@router.post(
    "/{store_id}/rows",
    **posts_a_job(with_blobs(any_of("StoreRowsSpec")), ended="The rows are there within the wait"),
)
async def post_rows(store_id: str, request: Request, credentials: Credentials) -> Response:
    """Append rows to a store, by a job: all of them, or none."""
    accept = partial(post_on_store, store_id=store_id, computation="store_rows")
    return await take_job(request, credentials, accept)


@router.post(
    "/{store_id}/queries",
    **posts_a_job(
        with_blobs(any_of("StoreQuerySpec")), ended="The scores are there within the wait"
    ),
)
async def post_query(store_id: str, request: Request, credentials: Credentials) -> Response:
    """Compare rows with those of a store, by a job."""
    accept = partial(post_on_store, store_id=store_id, computation="store_query")
    return await take_job(request, credentials, accept)


@router.post(
    "/{store_id}/curvature",
    **posts_a_job(
        with_blobs(any_of("StoreFitSpec")), ended="The curvature is there within the wait"
    ),
)
async def post_fit(store_id: str, request: Request, credentials: Credentials) -> Response:
    """Fit curvature to a store, by a job, in place of an earlier one of its kind."""
    accept = partial(post_on_store, store_id=store_id, computation="store_fit")
    return await take_job(request, credentials, accept)


@router.get(
    "/{store_id}/parts/{number}", response_class=FileResponse, dependencies=[Depends(transfer)]
)
def store_part(
    store_id: str, number: Annotated[int, Path(ge=0)], box: Box, caller: Caller
) -> FileResponse:
    """The safetensors file of one part: what one job appended. `Range` works."""
    store = visible(store_id, caller=caller, box=box)
    if number >= len(store.parts):
        raise StoreNotFound(
            f"expected a part of store {store.spec.name!r} from 0 to {len(store.parts) - 1}, got "
            f"{number}"
        )
    part = store.parts[number]
    path = box.stores.files.path(store.id, part.job)
    headers = {"ETag": f'"{part.sha256}"', "Cache-Control": "private, immutable, no-transform"}
    return FileResponse(path, media_type="application/octet-stream", headers=headers)


def _view(store: StoreRecord, caller: TokenInfo) -> StoreView:
    return store.view(of_owner=caller.name == store.owner)
