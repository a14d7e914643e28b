"""The losses that a job may name instead of sending a graph."""

from __future__ import annotations

from pydantic import BaseModel

from gradbox.builtin_losses.signatures import BUILTIN_SIGNATURES, LossSignature
from gradbox_service.http.auth import Caller
from gradbox_service.http.routes import Router

router = Router(prefix="/v1/losses", tags=["losses"])


class LossList(BaseModel):
    """All built-in losses."""

    losses: list[LossSignature]


@router.get("")
def list_losses(caller: Caller) -> LossList:
    """Every built-in loss: what it computes, its tensors and its options."""
    return LossList(losses=list(BUILTIN_SIGNATURES.values()))
