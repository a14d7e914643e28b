"""What a computation is handed, and what it hands back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gradbox_engine import Group, Observer
from gradbox_engine.job import Phase
from gradbox_worker.blob_tensors import BlobTensors
from gradbox_worker.device.work import Work
from gradbox_worker.models.registry import Loaded


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job with what all computations need made ready."""

    work: Work
    loaded: Loaded
    groups: list[Group]
    readout: Callable[..., Any] | None
    weights: Mapping[str, Tensor]
    tensors: BlobTensors
    device: torch.device
    observer: Observer


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What stands in the result file, and what the receipt says beyond what all receipts say.

    `tensors` go by SECTION/NAME. `facts` are fields of `Receipt`.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    seconds: Mapping[Phase, float]


class Compute(Protocol):
    """Computes a job of one kind."""

    def __call__(self, job: Job, spec: Any) -> Computed: ...
