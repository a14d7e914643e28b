"""The models that live workers offer."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from gradbox.protocol import ModelView
from gradbox_service.admission.model import find_model
from gradbox_service.http.auth import Box, Caller
from gradbox_service.jobs.fleet import offered_versions

router = APIRouter(prefix="/v1/models", tags=["models"])


class ModelList(BaseModel):
    models: list[ModelView]


@router.get("")
def list_models(box: Box, caller: Caller) -> ModelList:
    """Every model, in the version that most workers offer."""
    offered = offered_versions(box.fleet.workers())
    found = [box.fleet.model(name, version=versions[0]) for name, versions in offered.items()]
    return ModelList(models=[view for view in found if view is not None])


@router.get("/{name:path}")
def one_model(name: str, box: Box, caller: Caller) -> ModelView:
    """One model by NAME or NAME@VERSION: parameters, shapes, entry points, version."""
    return find_model(name, fleet=box.fleet)
