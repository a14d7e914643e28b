"""Stores that are made, and the jobs that append rows to them, query them and fit curvature."""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

from safetensors.numpy import load

from gradbox.errors import InvalidJob, StoreConflict, StoreNotFound
from gradbox.protocol import (
    WHOLE,
    StoreFitSpec,
    StoreJobSpec,
    StoreQuerySpec,
    StoreRowsSpec,
    StoreSpec,
    StoreView,
    TensorRef,
    parse_as,
    parse_posted,
    posted_document,
    spec_digest,
)
from gradbox_service.admission.limits import check_limits, check_memory, check_values
from gradbox_service.admission.model import find_model
from gradbox_service.admission.parameters import check_names
from gradbox_service.admission.posting import MEMORY_S, Admission, Sent, queue, unless_posted
from gradbox_service.backing import Backing
from gradbox_service.identity.tokens import TokenInfo
from gradbox_service.jobs import JobRecord
from gradbox_service.runs.states import settled
from gradbox_service.stores.ids import check_new, ids_of
from gradbox_service.stores.record import StoreRecord, check_loss

StoreJob = Literal["store_rows", "store_query", "store_fit"]


def make_store(body: bytes, *, sent: Sent, at: Admission) -> StoreRecord:
    """Make a store, or return the one of that name if it is made the same way.

    Raises:
        InvalidJob: the body makes none.
        InvalidInputs: a pattern of `wrt` matches nothing.
        StoreConflict: the caller has another one of that name.
        RunNotFound: there is no state of `state`.
        ServiceUnavailable: no worker has said yet which models there are, or Redis is full.
    """
    check_values(body, settings=at.settings)
    spec = parse_as(StoreSpec, posted_document(body))
    box, owner = at.box, sent.caller.name
    check_memory(box.records.memory(within_s=MEMORY_S))
    model = find_model(spec.model, workers=box.fleet.workers(), fleet=box.fleet)
    check_names(spec.wrt, model=model)
    if spec.state is not None:
        state = settled(spec.state, caller=sent.caller, runs=box.runs, records=box.records)
        spec = spec.model_copy(update={"state": state.ref})
    now_s = time.time()
    made = StoreRecord(
        id=uuid.uuid4().hex,
        owner=owner,
        spec=spec,
        model=model.name,
        model_version=model.version,
        created_s=now_s,
        used_s=now_s,
    )
    found = box.stores.create(made)
    _check_same(found, made)
    return found


def post_on_store(
    body: bytes, store_id: str, computation: StoreJob, *, sent: Sent, at: Admission
) -> JobRecord:
    """Queue a job that appends rows to a store, compares rows with its own, or fits curvature.

    Raises:
        StoreNotFound: the caller has no such store, or may not read it.
        InvalidInputs: an id comes twice, or is in the store already.
        InvalidJob: the body is no such job, or the store has not what it needs.
        GradboxError: see `queue`.
    """
    reads = computation == "store_query"
    store = visible(store_id, caller=sent.caller, box=at.box, to_write=not reads)
    spec = _posted(body, store, computation, at=at)
    check_limits(spec, caller=sent.caller, settings=at.settings)
    digest = spec_digest(spec)

    def queued() -> JobRecord:
        match spec:
            case StoreRowsSpec():
                check_loss(spec_digest(spec.loss), store)
                _check_ids(spec, store, sent=sent, box=at.box)
            case StoreQuerySpec():
                _check_has_rows(store)
                _check_fitted(spec.precondition, store)
                at.box.stores.change(store.id, lambda record: record.used(now_s=time.time()))
            case StoreFitSpec():
                _check_may_be_fitted(spec, store)
        return queue(spec, digest=digest, sent=sent, at=at)

    return unless_posted(queued, digest=digest, sent=sent, at=at)


def visible(
    store_id: str, *, caller: TokenInfo, box: Backing, to_write: bool = False
) -> StoreRecord:
    """Return a store by its id: one's own, one that one may read, or any for the box's owner.

    Raises:
        StoreNotFound: there is none, or the caller may not do that with it.
    """
    store = box.stores.get(store_id)
    if store is not None and (caller.admin or store.owner == caller.name):
        return store
    if store is None or not store.may_read(caller.name):
        raise StoreNotFound(
            f"expected a store of yours, or one that you may read, got {store_id[:80]!r}; "
            f"`gradbox stores list` shows them"
        )
    if to_write:
        raise StoreNotFound(
            f"store {store.spec.name!r} is {store.owner}'s, who lets you read it: only its owner "
            f"appends rows, grants and deletes"
        )
    return store


def listed(*, caller: TokenInfo, box: Backing, name: str | None) -> list[StoreView]:
    """Return the stores that somebody may read, newest first; `name` may be OWNER/NAME."""
    owner, _, last = (name or "").rpartition("/")
    return [
        store.view(of_owner=store.owner == caller.name)
        for store in box.stores.all()
        if (caller.admin or store.may_read(caller.name))
        and (name is None or (last == store.spec.name and store.owner == (owner or caller.name)))
    ]


def _posted(
    body: bytes, store: StoreRecord, computation: str, *, at: Admission
) -> StoreRowsSpec | StoreQuerySpec | StoreFitSpec:
    """Read a job on a store, with what the store says of it filled in.

    Raises:
        InvalidJob: it is none, or says something else itself.
    """
    check_values(body, settings=at.settings)
    whole = posted_document(body)
    spec = store.spec
    projection = spec.projection or WHOLE
    said: dict[str, Any] = {
        "computation": computation,
        "store": store.id,
        "model": store.full_model,
        "wrt": spec.wrt,
        "mode": spec.mode,
        "precision": spec.precision,
        "seed": spec.seed,
        "state": None if spec.state is None else spec.state.model_dump(exclude_none=True),
        "reduce": "projection",
        "kind": projection.kind,
        "dim": projection.dim,
    }
    for name, value in said.items():
        given = whole.get(name, value)
        if isinstance(given, dict):  # a state, of which the client also says what it has not
            given = {key: one for key, one in given.items() if one is not None}
        if given != value and (name, given) != ("model", store.model):
            raise InvalidJob(
                f"{name}: expected {value!r}, which store {spec.name!r} has, got {given!r:.100}; "
                f"leave it out"
            )
        whole[name] = value
    if computation == "store_rows":
        whole["row_dtype"] = spec.dtype
    posted = parse_posted(whole)
    assert isinstance(posted, StoreJobSpec)
    return posted


def _check_has_rows(store: StoreRecord) -> None:
    """Raises:
    InvalidJob: the store has none.
    """
    if not store.parts:
        raise InvalidJob(f"store {store.spec.name!r} has no rows yet: append some (store.add)")


def _check_fitted(kind: str | None, store: StoreRecord) -> None:
    """Raises:
    InvalidJob: the store has no curvature of that kind.
    """
    if kind is not None and store.curvature_of(kind) is None:
        there = ", ".join(one.kind for one in store.curvature) or "none"
        raise InvalidJob(
            f"precondition: store {store.spec.name!r} has no {kind!r} (but {there}): its owner "
            f"fits it with store.fit({kind!r}, …)"
        )


def _check_may_be_fitted(spec: StoreFitSpec, store: StoreRecord) -> None:
    """Raises:
    InvalidJob: the store's rows have no curvature of that kind.
    """
    if spec.curvature == "kernel":
        _check_has_rows(store)
        return
    projection = store.spec.projection or WHOLE
    if projection.kind != "per_layer":
        raise InvalidJob(
            f"{spec.curvature!r} acts on layers, but the rows of store {store.spec.name!r} are a "
            f"{projection.kind!r} of all layers together: fit 'kernel', or make a store with "
            f"projection=PerLayer(dim) or None"
        )


def _check_ids(spec: StoreRowsSpec, store: StoreRecord, *, sent: Sent, box: Backing) -> None:
    """Check the ids of new rows before anything is computed; the job's end does so again."""
    arrays = [_array(ref, sent, box) for ref in (spec.ids, spec.id_ends) if ref is not None]
    if all(array is not None for array in arrays):
        check_new(ids_of(*arrays), box.stores.files.paths(store))


def _array(ref: TensorRef, sent: Sent, box: Backing) -> Any:
    """Return a tensor of a blob of the caller's; None where there is none, as `admit` will say."""
    content = sent.blobs.get(ref.blob)
    if content is None and box.owners.owned_among(sent.caller.name, [ref.blob]):
        content = box.blobs.small(ref.blob) or box.blobs.path(ref.blob).read_bytes()
    return None if content is None else load(content).get(ref.tensor)


def _check_same(found: StoreRecord, made: StoreRecord) -> None:
    """Raises:
    StoreConflict: the store of that name is made in another way.
    """
    for name in StoreSpec.model_fields:
        if name == "model":
            there, wanted = found.full_model, made.full_model
        else:
            there, wanted = getattr(found.spec, name), getattr(made.spec, name)
        if there != wanted:
            raise StoreConflict(
                f"{name}: your store {found.spec.name!r} has {there!r:.200}, got {wanted!r:.200}; "
                f"open it without that (client.find_store), or take another name"
            )
