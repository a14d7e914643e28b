"""The end of a job: its result file, with the receipt in the metadata."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from gradbox.protocol import PROTOCOL, Receipt, Seconds
from gradbox_worker.computations.job import Computed
from gradbox_worker.computations.memory import PeakMemory
from gradbox_worker.files.result_file import Written
from gradbox_worker.files.result_in_place import ResultOnDisk
from gradbox_worker.files.rounded_gradients import RoundedGradients
from gradbox_worker.work import Work


def commit(
    result: ResultOnDisk,
    computed: Computed,
    work: Work,
    *,
    rounding: RoundedGradients,
    weights_widened: int,
    model: str,
    model_version: str,
    device: str,
    peak: PeakMemory,
    load_s: float,
    resumed: int,
    more_facts: Mapping[str, Any] | None = None,
) -> Written:
    """Round what was computed, write the job's receipt, and put the result file in its place.

    Args:
        weights_widened: how many of the job's weights came in 16 bits.
        device: what the job ran on, as the receipt calls it.
        load_s: how long model and inputs took.
        resumed: how many attempts went on from a checkpoint.
        more_facts: fields of `Receipt` beside those of `computed`.

    Raises:
        InvalidInputs: a dtype has no place in a safetensors file.
        StorageFull: the disk does not hold it.
    """
    spec = work.spec
    tensors = rounding.rounded(computed.tensors)
    peak_bytes, before_bytes = peak.measure()
    receipt = Receipt(
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
        seconds=Seconds.model_validate(
            {"queued": work.queued_s, "load": load_s, **computed.seconds}
        ),
        peak_memory_bytes=peak_bytes,
        memory_before_bytes=before_bytes,
        attempts=work.attempt,
        resumed=resumed,
        not_split=work.not_split or None,
        **computed.facts,
        **rounding.facts(weights_widened=weights_widened),
        **(more_facts or {}),
    )
    metadata = {"format": "pt", "gradbox": receipt.model_dump_json()}
    return result.commit(tensors, metadata=metadata | {**computed.metadata, **rounding.metadata()})


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
