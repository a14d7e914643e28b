"""Probes: does the process run, and can jobs run; and `/metrics`, in the words of Prometheus."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel

from gradbox.errors import BoxDraining, GradboxError, OwnerOnly, ServiceUnavailable
from gradbox.protocol import OperationMode
from gradbox_service.admission.limits import why_no_room
from gradbox_service.fleet.workers import offered_versions, said_builds
from gradbox_service.http.auth import Box, Caller
from gradbox_service.http.routes import Router
from gradbox_service.repeating_thread import RepeatingThread
from gradbox_service.watching.metrics import Metrics

router = Router(tags=["probes"])


class Live(BaseModel):
    live: bool = True


class Ready(BaseModel):
    """How many workers live, the models that they offer, and whether they are handed jobs.

    `refuses` says why the box takes no new ones for now, though it answers everything else;
    `builds` which models are built beside them, to be offered after a reload.
    """

    ready: bool = True
    workers: int
    models: list[str]
    mode: OperationMode = OperationMode.RUNNING
    reason: str = ""
    refuses: str = ""
    builds: str = ""


@router.get("/livez")
async def livez(request: Request) -> Live:
    """The process runs, and so do its threads."""
    ended = _ended_threads(request)
    if ended:
        raise GradboxError(
            f"a thread of the service has ended ({', '.join(ended)}): see its log, and restart it"
        )
    return Live()


@router.get("/readyz")
def readyz(request: Request, box: Box) -> Ready:
    """Jobs can run: all threads live, Redis answers, and a live worker has described its models.

    A paused box is ready and says so, and so is one without room; one that drains is not.
    """
    ended = _ended_threads(request)
    if ended:
        raise ServiceUnavailable(
            f"a thread of the service has ended ({', '.join(ended)}); `gradbox up` restarts it"
        )
    refuses = why_no_room(box.records.memory(), box.blobs.room)
    live = box.fleet.workers()
    workers = [worker for worker in live if worker.state != "starting"]
    builds = said_builds(live)
    if not workers:
        # On a full disk none can say that it lives; that reason goes first.
        doing = f"one {builds}" if builds else "the first start loads torch and the models"
        raise ServiceUnavailable(
            f"no worker is ready: {refuses and f'{refuses}; else '}{doing}; if it lasts, look at "
            f"the worker's log"
        )
    operation = box.operation.read()
    if operation.mode is OperationMode.DRAINING:
        raise BoxDraining(f"this box is {operation}; it takes no new jobs")
    return Ready(
        workers=len(workers),
        models=list(offered_versions(workers)),
        mode=operation.mode,
        reason=operation.reason,
        refuses=refuses,
        builds=builds,
    )


def _ended_threads(request: Request) -> list[str]:
    """Return the names of the service's threads that live no more."""
    state = request.app.state
    threads: dict[str, RepeatingThread] = {
        "dispatcher": state.dispatcher,
        "cleaner": state.cleaner,
    }
    return [name for name, thread in threads.items() if not thread.alive]


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(request: Request, caller: Caller) -> Response:
    """The box's metrics, which name its users; for the box's owner alone."""
    if not caller.admin:
        raise OwnerOnly(
            "/metrics names everybody's use, which only the box's owner may see: have Prometheus "
            "send the token that `gradbox up` wrote"
        )
    found: Metrics = request.app.state.metrics
    return Response(generate_latest(found.registry), media_type=CONTENT_TYPE_LATEST)
