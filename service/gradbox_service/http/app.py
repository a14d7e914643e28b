"""The HTTP app, put together."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from importlib import metadata

import anyio.to_thread
import redis
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from gradbox_service.admission.posting import Admission
from gradbox_service.admission.quota import Quota
from gradbox_service.backing import Backing
from gradbox_service.cleaning.cleaner import Cleaner
from gradbox_service.dashboard import pages
from gradbox_service.dashboard.board import Board
from gradbox_service.http import openapi, problems
from gradbox_service.http.allowances import open_streams, open_transfers
from gradbox_service.http.bodies import Bodies
from gradbox_service.http.event_hub import Hub
from gradbox_service.http.request_rate import RequestRate
from gradbox_service.http.routes import (
    blobs,
    box,
    jobs,
    models,
    probes,
    results,
    runs,
    session,
    stores,
)
from gradbox_service.queue.dispatch import Dispatcher
from gradbox_service.settings import Settings
from gradbox_service.store.files import make_folder
from gradbox_service.watching.metrics import Metrics
from gradbox_service.watching.requests import RequestWatch
from gradbox_service.watching.scrape import BoxCollector

DESCRIPTION = "Exact gradients of large pretrained PyTorch models, computed on this box."
# What a page of an origin of `cors_origin` may do: all that a program with a token may. It sends no
# cookie, nor the dashboard's header (`http.auth`).
PAGE_METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")
PAGE_SENDS = (
    "Authorization",
    "Idempotency-Key",
    "If-None-Match",
    "If-Range",
    "Last-Event-ID",
    "Prefer",
    "Range",
    "traceparent",
    "X-Request-ID",
)
PAGE_READS = (
    "Accept-Ranges",
    "Content-Disposition",
    "Content-Range",
    "ETag",
    "Preference-Applied",
    "Retry-After",
    "X-Request-ID",
)


def create_app(settings: Settings, *, backing: Backing | None = None) -> FastAPI:
    """Return the service. Nothing connects before the app's lifespan begins.

    Args:
        backing: what the service stands on; the Redis and the folder of `settings` if None.

    Raises:
        BadSettings: no backing was given and the settings name no usable Redis.
    """
    app = FastAPI(
        title="gradbox",
        version=metadata.version("gradbox"),
        description=DESCRIPTION,
        lifespan=_lifespan,
        redirect_slashes=False,
        openapi_url=None,  # served below, by a thread and made once: it takes a third of a second
        docs_url=None,  # the dashboard has a page of its own, which loads nothing from elsewhere
        redoc_url=None,
        responses=openapi.PROBLEM,
    )
    backing = backing or Backing.on_redis(settings)
    app.state.settings = settings
    app.state.backing = backing
    app.state.board = board = Board(backing)
    app.state.hub = hub = Hub(
        backing.records,
        backing.results,
        on_changes=board.note,
        anybody_else=lambda: board.watched,
    )
    app.state.streams = open_streams(settings)
    app.state.transfers = open_transfers(settings)
    app.state.metrics = Metrics()
    app.state.dispatcher = Dispatcher(
        backing,
        half_life_s=settings.share_half_life_s,
        ended=app.state.metrics.job_ended,
        heard=hub.hear,
    )
    app.state.metrics.registry.register(
        BoxCollector(backing, app.state.dispatcher, clock=time.time)
    )
    app.state.cleaner = Cleaner(settings, backing)
    app.state.quota = Quota(settings.owner_quota_bytes, box=backing, cleaner=app.state.cleaner)
    app.state.admission = Admission(
        box=backing,
        dispatcher=app.state.dispatcher,
        quota=app.state.quota,
        under_way=app.state.cleaner.under_way,
        settings=settings,
    )
    app.state.bodies = Bodies(folder=settings.data, limit_bytes=settings.max_spec_bytes)
    app.state.request_rate = RequestRate(settings.requests_per_s)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin,
            allow_methods=PAGE_METHODS,
            allow_headers=PAGE_SENDS,
            expose_headers=PAGE_READS,
        )
    # The outermost: it gives refusals an id too.
    app.add_middleware(RequestWatch, metrics=app.state.metrics)
    problems.install(app)
    app.router.routes.insert(0, jobs.POSTED)
    for module in (jobs, runs, stores, blobs, results, models, box, session, probes):
        app.include_router(module.router)
    app.include_router(runs.saves)
    app.include_router(models.losses)
    app.include_router(pages.router())
    app.openapi = cache(partial(openapi.describe, app))  # type: ignore[method-assign]
    described = ("/openapi.json", lambda: app.openapi())
    app.add_api_route(*described, methods=["GET", "HEAD"], include_in_schema=False)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    box: Backing = app.state.backing
    hub: Hub = app.state.hub
    settings: Settings = app.state.settings
    make_folder(settings.data)
    dispatcher: Dispatcher = app.state.dispatcher
    cleaner: Cleaner = app.state.cleaner
    hub.start()
    dispatcher.start()
    cleaner.start()
    try:
        yield
    finally:
        app.state.board.close()
        hub.close()
        dispatcher.close()
        cleaner.close()
        with suppress(redis.RedisError):  # without it both end at their next look
            await anyio.to_thread.run_sync(box.records.wake)
        await anyio.to_thread.run_sync(dispatcher.join)
        await anyio.to_thread.run_sync(cleaner.join)
