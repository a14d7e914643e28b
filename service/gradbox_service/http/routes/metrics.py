"""`/metrics`, in the words of Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gradbox.errors import OwnerOnly
from gradbox_service.http.auth import Caller
from gradbox_service.watching.metrics import Metrics

router = APIRouter(tags=["probes"])


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
