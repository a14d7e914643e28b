"""What a computation is handed, and what it hands back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from gradbox.protocol import JobOptions, SharedSpec, option_names
from gradbox_engine import CallKeywords, Group, KeptPass, Observer
from gradbox_engine.requests import Phase
from gradbox_worker.computations.checkpoints import CheckpointFile
from gradbox_worker.computations.kept_graphs import KeptGraphs
from gradbox_worker.files.blob_tensors import BlobTensors
from gradbox_worker.files.result_in_place import ResultOnDisk
from gradbox_worker.files.rounded_gradients import RoundedGradients
from gradbox_worker.models.registry import Loaded
from gradbox_worker.work import Work

ENGINE_OPTIONS: Final = option_names(JobOptions) & CallKeywords.__optional_keys__


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

    @property
    def calls(self) -> dict[str, Any]:
        """How the model is called: the engine's `CallOptions`, but for penalties."""
        return call_options(self.work.spec, readout=self.readout, weights=self.weights)


def call_options(
    spec: SharedSpec,
    *,
    readout: Callable[..., Any] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Return a job's options as the engine takes them by the same names, see `CallKeywords`."""
    own = {name: getattr(spec, name) for name in ENGINE_OPTIONS}
    return own | {"readout": readout, "weights": weights}


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
