"""What a computation is handed, and what it hands back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from gradbox_engine import Group, KeptPass, Observer
from gradbox_engine.requests import Phase
from gradbox_worker.computations.checkpoints import CheckpointFile
from gradbox_worker.computations.kept_graphs import KeptGraphs
from gradbox_worker.files.blob_tensors import BlobTensors
from gradbox_worker.files.result_in_place import ResultOnDisk
from gradbox_worker.files.rounded_gradients import RoundedGradients
from gradbox_worker.models.registry import Loaded
from gradbox_worker.work import Work


@dataclass(frozen=True, kw_only=True)
class LoadedJob:
    """A job with what all computations need made ready."""

    work: Work
    loaded: Loaded
    groups: list[Group]
    readout: Callable[..., Any] | None
    weights: Mapping[str, Tensor]
    tensors: BlobTensors
    device: torch.device
    observer: Observer
    result: ResultOnDisk
    rounding: RoundedGradients
    result_memory_bytes: int  # for what is on its way into the result file
    kept: KeptGraphs
    checkpoints: CheckpointFile


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What stands in the result file, and what the receipt says beyond what all receipts say.

    `tensors` are named SECTION/NAME, beside what was written to `LoadedJob.result` already. `facts`
    are fields of `Receipt`, `metadata` stands beside it. `kept` are graphs for a later job.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    seconds: Mapping[Phase, float]
    metadata: Mapping[str, str] = field(default_factory=dict)
    kept: KeptPass | None = None


class Compute(Protocol):
    """Computes a job of one kind."""

    def __call__(self, job: LoadedJob, spec: Any) -> Computed: ...
