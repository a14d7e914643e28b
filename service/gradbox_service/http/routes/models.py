"""The models that live workers offer, those that they cannot build, and the built-in losses."""

from __future__ import annotations

from pydantic import BaseModel

from gradbox.builtin_losses.signatures import BUILTIN_SIGNATURES, LossSignature
from gradbox.errors import OwnerOnly
from gradbox.protocol import ModelList, ModelView
from gradbox_service.admission.model import find_model
from gradbox_service.backing import Backing
from gradbox_service.fleet.workers import offered_versions, unusable_models
from gradbox_service.http.auth import Box, Caller
from gradbox_service.http.routes import Router

router = Router(prefix="/v1/models", tags=["models"])
losses = Router(prefix="/v1/losses", tags=["losses"])


class LossList(BaseModel):
    """All built-in losses."""

    losses: list[LossSignature]


@losses.get("")
def list_losses(caller: Caller) -> LossList:
    """Every built-in loss: what it computes, its tensors and its options."""
    return LossList(losses=list(BUILTIN_SIGNATURES.values()))


@router.get("")
def list_models(box: Box, caller: Caller) -> ModelList:
    """Every model by name, in the version that most workers offer, or with why none can."""
    return _models(box)


@router.post("/reload", status_code=202)
def reload_models(box: Box, caller: Caller) -> ModelList:
    """Have every worker read its models file again, beside its jobs; for the box's owner."""
    if not caller.admin:
        raise OwnerOnly(
            "reloading the models is for the box's owner: ask them, or use the token that "
            "`gradbox up` wrote"
        )
    box.fleet.ask_for_reload()
    return _models(box)


@router.get("/{name:path}")
def one_model(name: str, box: Box, caller: Caller) -> ModelView:
    """One model by NAME or NAME@VERSION: parameters, shapes, entry points, version, an example."""
    plain = name.partition("@")[0]
    reason = unusable_models(box.fleet.workers()).get(plain)
    if reason is not None:
        return ModelView(name=plain, usable=False, reason=reason)
    return find_model(name, workers=box.fleet.workers(), fleet=box.fleet)


def _models(box: Backing) -> ModelList:
    workers = box.fleet.workers()
    asked = box.fleet.reloads()
    offered = offered_versions(workers).items()
    found = [box.fleet.model(name, version=versions[0]) for name, versions in offered]
    unusable = [
        ModelView(name=name, usable=False, reason=why)
        for name, why in unusable_models(workers).items()
    ]
    return ModelList(
        models=sorted(
            [*(view for view in found if view is not None), *unusable], key=lambda view: view.name
        ),
        reloading=[worker.name for worker in workers if worker.reloads != asked],
        errors={worker.name: worker.reload_error for worker in workers if worker.reload_error},
    )
