"""How a posted body, with the blobs that come in it, becomes a queued job."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from typing import Final

from redis.client import Pipeline

from gradbox.errors import (
    BlobRejected,
    BlobTooLarge,
    BoxDraining,
    GradboxError,
    InvalidJob,
    UnknownModel,
)
from gradbox.protocol import (
    CotangentGradientSpec,
    CotangentsLoss,
    CotangentStepSpec,
    GradientSpec,
    JobSpec,
    OperationMode,
    PostedSpec,
    SetLossSpec,
    StateSpec,
    StepSpec,
    StoreJobSpec,
    parse_posted,
    spec_digest,
)
from gradbox.tensors.safetensors_header import SafetensorsHeader, header_of
from gradbox_service.accounting.blob_owners import OwnBlobs
from gradbox_service.admission.admit import AdmittedJob, admit
from gradbox_service.admission.earlier_job import FACTORED_ROWS, check_against, result_header
from gradbox_service.admission.forward_job import ForwardJob, forward_job
from gradbox_service.admission.limits import (
    check_leaves_room,
    check_limits,
    check_queue,
    check_room,
    check_values,
)
from gradbox_service.admission.quota import Quota
from gradbox_service.admission.run_state import settle_state
from gradbox_service.backing import Backing
from gradbox_service.cleaning.under_way import UnderWay
from gradbox_service.database.conditional_commands import Beside
from gradbox_service.fleet import Standing, WorkerPresence
from gradbox_service.identity.tokens import TokenInfo
from gradbox_service.jobs import JobRecord
from gradbox_service.queue.dispatch import Dispatcher
from gradbox_service.runs.record import RunRecord
from gradbox_service.settings import Settings

# As many of a version's digits as name it.
PINNED_DIGITS: Final = 16
# How old a look at Redis' memory may be: it does not fill up faster.
MEMORY_S: Final = 1.0


def checked(blobs: Mapping[str, bytes], *, limit_bytes: int) -> dict[str, SafetensorsHeader]:
    """Return the headers of blobs that came with a job, by the digests that they came under.

    Raises:
        BlobRejected: the bytes have another digest, or are no whole safetensors file.
        BlobTooLarge: one is larger than a blob may be.
    """
    for digest, content in blobs.items():
        if len(content) > limit_bytes:
            raise BlobTooLarge(
                f"blob {digest[:12]}… has {len(content)} bytes, this box takes {limit_bytes}; cut "
                "the shards into several blobs"
            )
        found = hashlib.sha256(content).hexdigest()
        if found != digest:
            raise BlobRejected(
                f"the {len(content)} bytes that came with the job have the SHA-256 {found}, "
                f"expected {digest}; send them again, and if it repeats, compute the digest anew"
            )
    return {digest: header_of(BytesIO(content)) for digest, content in blobs.items()}


@contextmanager
def taking(
    blobs: Mapping[str, bytes], *, owner: str, box: Backing, quota: Quota
) -> Iterator[Callable[[Pipeline], None]]:
    """Store checked blobs of an owner that they have not sent before; from then on they are theirs.

    Gives what adds the small ones to the write that creates the job, which counts them then.

    Raises:
        BlobTooLarge: all exceed the quota by themselves.
        StorageFull: they exceed the owner's quota, or the disk does not hold them.
    """
    small = {name: data for name, data in blobs.items() if box.blobs.takes_small(len(data))}
    large = {name: data for name, data in blobs.items() if name not in small}
    counted = blobs if quota.limits else large
    stored = box.blobs.headers(box.owners.owned_among(owner, list(counted))) if counted else {}
    new = {digest: len(data) for digest, data in counted.items() if digest not in stored}

    def write(pipe: Pipeline) -> None:
        if small:
            box.owners.claim_by(pipe, owner, {digest: len(data) for digest, data in small.items()})
        for digest, data in small.items():
            box.blobs.write_small(pipe, digest, data)

    with quota.taking(owner) as taken:
        if new:
            taken.cover(sum(new.values()))
        new_files = {digest: size for digest, size in new.items() if digest in large}
        for digest in new_files:
            box.blobs.put(digest, [large[digest]])
        if new_files:
            box.owners.claim(owner, new_files)
        yield write


@dataclass(frozen=True)
class Admission:
    """What a job is checked against, and where it is queued."""

    box: Backing
    dispatcher: Dispatcher
    quota: Quota
    under_way: UnderWay
    settings: Settings


@dataclass(frozen=True)
class Sent:
    """What comes with a request beside its body.

    Attributes:
        blobs: by the digests that they are said to have.
        traceparent: the parent of the job's spans.
    """

    caller: TokenInfo
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    idempotency_key: str | None = None
    traceparent: str | None = None


def post(body: bytes, sent: Sent, *, at: Admission) -> JobRecord:
    """Check the body and queue its job, or return the job that it made before.

    A repeated post gives the same job, also if the model or a blob has gone since or the box takes
    no more. Only cotangents need the job that they continue.

    Raises:
        InvalidJob: the body is no job, or the box cannot run it (see `admit`).
        IdempotencyConflict: the key came before with another job.
        GradboxError: see `queue`.
    """
    check_values(body, settings=at.settings)
    posted = parse_posted(body)
    if isinstance(posted, StepSpec | CotangentStepSpec | StateSpec | StoreJobSpec):
        raise InvalidJob(
            f"computation: expected one that is posted here, got {posted.computation!r}: steps of "
            f"a run go to POST /v1/runs/ID/steps/NUMBER, and states are asked for by "
            f"GET /v1/runs/ID/weights and POST /v1/runs/ID/saves; what is done with a store goes "
            f"to POST /v1/stores/ID/rows, /queries and /curvature"
        )
    check_limits(posted, caller=sent.caller, settings=at.settings)
    if isinstance(posted, CotangentGradientSpec):
        forward = forward_job(posted.loss.forward, owner=sent.caller.name, box=at.box)
        spec: JobSpec = forward.complete(posted, GradientSpec)
    else:
        forward, spec = None, posted
    digest = spec_digest(spec)

    def queued() -> JobRecord:
        settled, run = settle_state(spec, caller=sent.caller, box=at.box)
        return queue(settled, digest=digest, forward=forward, run=run, sent=sent, at=at)

    return unless_posted(queued, digest=digest, sent=sent, at=at)


def posted_again(spec: JobSpec, *, model_version: str) -> PostedSpec:
    """Return what is posted for a job once more, on the version of the model that it had."""
    if isinstance(spec, GradientSpec) and isinstance(spec.loss, CotangentsLoss):
        own = {name: getattr(spec, name) for name in CotangentGradientSpec.model_fields}
        return CotangentGradientSpec.model_construct(**own)
    pinned = f"{spec.model.partition('@')[0]}@{model_version[:PINNED_DIGITS]}"
    return spec.model_copy(update={"model": pinned})


def unless_posted(
    queued: Callable[[], JobRecord], *, digest: str, sent: Sent, at: Admission
) -> JobRecord:
    """Queue a job; where that is refused, return the job that the same post made before.

    Raises:
        IdempotencyConflict: the key came before with another job.
        GradboxError: what `queued` raises.
    """
    try:
        return queued()
    except GradboxError:
        if sent.idempotency_key is None:
            raise
        earlier = at.box.records.posted(
            sent.caller.name, idempotency_key=sent.idempotency_key, spec_digest=digest
        )
        if earlier is None:
            raise
        return earlier


def queue(
    spec: JobSpec,
    *,
    sent: Sent,
    at: Admission,
    digest: str | None = None,
    forward: ForwardJob | None = None,
    run: RunRecord | None = None,
    beside: Callable[[str], Beside] = lambda _: Beside(),
) -> JobRecord:
    """Check a whole spec and queue its job.

    Args:
        digest: of the spec as it was posted, if that was another one.
        forward: the job whose outputs its cotangents belong to.
        run: on whose state it is; the device that made its last step goes first.
        beside: returns what is written together with a job of this id.

    Raises:
        InvalidJob: the box cannot run it (see `admit`).
        BlobRejected: see `checked`.
        IdempotencyConflict: the key came before with another job.
        QueueFull: as many of the caller's jobs wait as may, or they take too much of Redis.
        BoxDraining: the box takes no new jobs.
        StorageFull: the caller's quota is reached, or the disk takes no file.
        ServiceUnavailable: no worker has said yet which models there are, or Redis is full.
        Outdated: what must hold for `beside` does not.
    """
    box, settings, owner = at.box, at.settings, sent.caller.name
    standing = box.fleet.standing()
    _check_box(spec, standing, owner=owner, at=at)
    headers = checked(sent.blobs, limit_bytes=settings.max_blob_bytes)
    with (
        taking(sent.blobs, owner=owner, box=box, quota=at.quota) as write_blobs,
        at.under_way.posting(owner),
    ):
        workers = standing.workers
        admitted = _admitted(spec, forward, sent=headers, owner=owner, workers=workers, box=box)
        model = admitted.model
        record = JobRecord(
            id=uuid.uuid4().hex,
            owner=owner,
            computation=spec.computation,
            model=model.name,
            model_version=model.version,
            spec_digest=digest or spec_digest(spec),
            created_s=time.time(),
            name=spec.name,
            priority=spec.priority,
            timeout_s=min(spec.timeout_s, settings.max_timeout_s),
            max_attempts=settings.max_attempts,
            idempotency_key=sent.idempotency_key or "",
            traceparent=sent.traceparent,
            estimate=admitted.estimate,
            estimate_key=admitted.estimate_key,
        )
        more = beside(record.id)

        def write(pipe: Pipeline) -> None:
            write_blobs(pipe)
            more.write(pipe)

        is_fed = at.dispatcher.hands_out(record, workers=workers, hold=standing.operation.hold)
        created = None
        try:
            created = box.records.create(
                record,
                spec=spec,
                turns=box.turns if is_fed else None,
                worker=_worker_with(run, workers, at) if is_fed and run is not None else "",
                beside=Beside(write, more.where),
            )
            return created
        finally:
            if is_fed and (created is None or created.id != record.id):
                at.dispatcher.not_created(record)


def _worker_with(run: RunRecord, workers: Sequence[WorkerPresence], at: Admission) -> str:
    """Return the worker that has a run's newest state on its device, if that idles; else ""."""
    last = at.box.records.get(run.last_job) if run.last_job and len(workers) > 1 else None
    if last is None or last.worker not in {worker.name for worker in workers}:
        return ""
    return at.dispatcher.prefers(last)


def _check_box(
    spec: JobSpec,
    standing: Standing,
    *,
    owner: str,
    at: Admission,
) -> None:
    """Check that the box takes another job of the owner."""
    operation = standing.operation
    if operation.mode is OperationMode.DRAINING:
        raise BoxDraining(
            f"this box is {operation}; it takes no new jobs, those that wait stay where "
            f"they are: submit again once it is back"
        )
    records = at.box.records
    memory = records.memory(within_s=MEMORY_S)
    check_room(memory, at.box.blobs.room)
    check_leaves_room(owner, memory=memory, records=records)
    at.quota.check(spec, owner=owner)
    check_queue(at.dispatcher.num_active(owner), settings=at.settings)


def _admitted(
    spec: JobSpec,
    forward: ForwardJob | None,
    *,
    sent: Mapping[str, SafetensorsHeader],
    owner: str,
    workers: Sequence[WorkerPresence],
    box: Backing,
) -> AdmittedJob:
    """Return the model that the job will run on, and what was measured of its like."""
    own = OwnBlobs(owner, blobs=box.blobs, owners=box.owners, sent=sent)
    admitting = partial(admit, spec, fleet=box.fleet, blobs=own, estimates=box.results.estimates)
    try:
        try:
            admitted = admitting(workers=workers)
        except UnknownModel:  # what is known of workers may be a second old
            admitted = admitting(workers=box.fleet.workers())
    except UnknownModel as error:
        if forward is None:
            raise
        raise forward.outlived() from error
    rows = check_against(spec, model=admitted.model, owner=owner, records=box.records)
    if rows is not None:
        result_header(rows, where="against", kind=FACTORED_ROWS, box=box)
    if forward is not None:
        assert isinstance(spec, SetLossSpec)
        assert isinstance(spec.loss, CotangentsLoss)
        forward.check_kept(box=box)
        forward.check(spec.loss, blobs=own)
    return admitted
