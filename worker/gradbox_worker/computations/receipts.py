"""The end of a job: its result file, with the receipt in the metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gradbox.protocol import PROTOCOL, Receipt, Seconds
from gradbox_worker.computations.identity import gradbox_version
from gradbox_worker.computations.job import Computed
from gradbox_worker.computations.memory import PeakMemory
from gradbox_worker.files.result_file import Written
from gradbox_worker.files.result_in_memory import ResultPlace
from gradbox_worker.files.rounded_gradients import RoundedGradients
from gradbox_worker.work import Work


def commit(
    result: ResultPlace,
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
    led: Mapping[str, Any],
) -> Written:
    """Round what was computed, write the job's receipt, and put the result file in its place.

    Args:
        weights_widened: how many of the job's weights came in 16 bits.
        device: what the job ran on, as the receipt calls it.
        load_s: how long model and inputs took.
        resumed: how many attempts went on from a checkpoint.
        led: fields of `Receipt` by the devices that the job's own one led; they go before.

    Raises:
        InvalidInputs: a dtype has no place in a safetensors file.
        StorageFull: the disk does not hold it.
    """
    spec = work.spec
    tensors = rounding.rounded(computed.tensors)
    peak_bytes, before_bytes = peak.measure()
    ran = {"device": device, "resumed": resumed, **led}
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
        recompute=spec.recompute,
        torch=torch.__version__,
        gradbox=gradbox_version(),
        shards={group.name: len(group.shards) for group in spec.inputs},
        shards_recomputed=computed.recomputed.shards,
        recomputed_blocks=list(computed.recomputed.blocks),
        seconds=Seconds.model_validate(
            {"queued": work.queued_s, "load": load_s, **computed.seconds}
        ),
        peak_memory_bytes=peak_bytes,
        memory_before_bytes=before_bytes,
        attempts=work.attempt,
        not_split=work.not_split or None,
        **computed.facts,
        **rounding.facts(weights_widened=weights_widened),
        **ran,
    )
    metadata = {"format": "pt", "gradbox": receipt.model_dump_json()}
    return result.commit(tensors, metadata=metadata | {**computed.metadata, **rounding.metadata()})
