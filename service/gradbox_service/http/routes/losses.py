"""The losses that a job may name instead of sending a graph."""

from __future__ import annotations

from gradbox.builtin_losses.signatures import BUILTIN_SIGNATURES, Signature
from gradbox.protocol import LossList, LossOption, LossTensor, LossView
from gradbox_service.http.auth import Caller
from gradbox_service.http.routes import Router

router = Router(prefix="/v1/losses", tags=["losses"])


@router.get("")
def list_losses(caller: Caller) -> LossList:
    """Every built-in loss: what it computes, its tensors and its options."""
    return LossList(losses=[_view(*item) for item in BUILTIN_SIGNATURES.items()])


def _view(name: str, signature: Signature) -> LossView:
    return LossView(
        name=name,
        summary=signature.summary,
        tensors=[
            LossTensor(name=tensor, shape=shape, required=tensor not in signature.optional)
            for tensor, shape in zip(signature.tensors, signature.shapes, strict=True)
        ],
        options=[
            LossOption(
                name=option,
                meaning=facts.meaning,
                default=facts.default,
                above=facts.above,
                at_least=facts.at_least,
                choices=list(facts.choices),
            )
            for option, facts in signature.options.items()
        ],
    )
