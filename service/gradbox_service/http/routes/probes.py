"""Probes: does the process run, and can jobs run."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from gradbox.errors import GradboxError, ServiceUnavailable
from gradbox_service.http.auth import Box
from gradbox_service.http.event_hub import Hub
from gradbox_service.jobs.fleet import offered_versions
from gradbox_service.queue.dispatch import Dispatcher

router = APIRouter(tags=["probes"])


class Live(BaseModel):
    live: bool = True


class Ready(BaseModel):
    """How many workers live, and the models that they offer."""

    ready: bool = True
    workers: int
    models: list[str]


@router.get("/livez")
async def livez(request: Request) -> Live:
    """The process runs, and so do its two threads."""
    hub: Hub = request.app.state.hub
    dispatcher: Dispatcher = request.app.state.dispatcher
    if not (hub.alive and dispatcher.alive):
        raise GradboxError("a thread of the service has ended: see its log, and restart it")
    return Live()


@router.get("/readyz")
def readyz(box: Box) -> Ready:
    """Jobs can run: Redis answers, and a live worker has described its models."""
    box.records.ping()
    workers = [worker for worker in box.fleet.workers() if worker.state != "starting"]
    if not workers:
        raise ServiceUnavailable(
            "no worker is ready: the first start loads torch and the models; if it lasts, look at "
            "the worker's log"
        )
    return Ready(workers=len(workers), models=list(offered_versions(workers)))
