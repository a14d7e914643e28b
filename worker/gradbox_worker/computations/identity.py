"""What a job runs on, by name: for its receipt, and for the checkpoints that it may go on from."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from functools import cache

import torch


@cache
def gradbox_version() -> str:
    """Return the installed version; to find it takes longer than a small job's gradient."""
    return importlib.metadata.version("gradbox")


def device_name(*devices: torch.device) -> str:
    """Return what a receipt calls the devices of a model."""
    named = ", ".join(map(str, devices))
    return f"{named} ({kind_of(*devices)})" if devices[0].type == "cuda" else named


def kind_of(*devices: torch.device) -> str:
    """Return what devices of one kind have in common: a checkpoint may go on on others."""
    kinds = [torch.cuda.get_device_name(d) if d.type == "cuda" else d.type for d in devices]
    return kinds[0] if len(kinds) == 1 else f"{len(kinds)} × {' + '.join(dict.fromkeys(kinds))}"


def identity_of(
    spec_digest: str, model_version: str, devices: Sequence[torch.device]
) -> dict[str, str]:
    """Return what must be equal for an attempt to go on from another one's state.

    Of a GPU it is the kind: the job may go on another one of them.
    """
    return {
        "spec": spec_digest,
        "model": model_version,
        "device": kind_of(*devices),
        "torch": torch.__version__,
        "gradbox": gradbox_version(),
    }
