"""The receipt of a job, and the metadata that it stands in."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from gradbox.protocol import PROTOCOL, Receipt, Seconds
from gradbox_engine.requests import Phase
from gradbox_worker.computations.memory import PeakMemory
from gradbox_worker.files.rounded_gradients import RoundedGradients
from gradbox_worker.work import Work


def metadata_of(
    receipt: Receipt, metadata: Mapping[str, str], rounding: RoundedGradients
) -> dict[str, str]:
    """Return the metadata of a job's result file."""
    return {
        "format": "pt",
        "gradbox": receipt.model_dump_json(),
        **metadata,
        **rounding.metadata(),
    }


def receipt_of(
    work: Work,
    facts: Mapping[str, Any],
    *,
    model: str,
    model_version: str,
    device: str,
    seconds: Mapping[Phase, float],
    peak: PeakMemory,
    load_s: float,
    resumed: int = 0,
) -> Receipt:
    """Return a job's receipt.

    Args:
        facts: what a computation says of itself: fields of `Receipt`.
        device: what the job ran on, as the receipt calls it.
        load_s: how long model and inputs took.
        resumed: how many attempts went on from a checkpoint.
    """
    spec = work.spec
    peak_bytes, before_bytes = peak.measure()
    return Receipt(
        protocol=PROTOCOL,
        job=work.job_id,
        spec_digest=work.spec_digest,
        computation=spec.computation,
        model=model,
        model_version=model_version,
        seed=spec.seed,
        mode=spec.mode,
        precision=spec.precision,
        device=device,
        torch=torch.__version__,
        gradbox=gradbox_version(),
        shards={group.name: len(group.shards) for group in spec.inputs},
        seconds=Seconds.model_validate({"queued": work.queued_s, "load": load_s, **seconds}),
        peak_memory_bytes=peak_bytes,
        memory_before_bytes=before_bytes,
        attempts=work.attempt,
        resumed=resumed,
        not_split=work.not_split or None,
        **facts,
    )


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
