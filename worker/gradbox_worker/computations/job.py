"""What a computation is handed, and what it hands back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from gradbox.protocol import JobOptions, SharedSpec, option_names
from gradbox_engine import CallKeywords, Group, Objective, Observer
from gradbox_engine.ranges import Range
from gradbox_engine.requests import NOT_RECOMPUTED, Phase, Recomputed
from gradbox_worker.computations.checkpoints import JobCheckpoints, Pace
from gradbox_worker.computations.engine_inputs import built_readout, input_groups
from gradbox_worker.computations.identity import identity_of
from gradbox_worker.computations.kept_graphs import KeptGraphs
from gradbox_worker.computations.leading import ALONE, Leading, Rows, Run
from gradbox_worker.files.blob_tensors import BlobTensors
from gradbox_worker.files.rounded_gradients import RoundedGradients, widened_weights
from gradbox_worker.models.registry import Loaded
from gradbox_worker.runs import HeldRun
from gradbox_worker.work import StoredCurvature, StoredRows, Work

ENGINE_OPTIONS: Final = option_names(JobOptions) & CallKeywords.__optional_keys__


@dataclass(frozen=True, kw_only=True)
class LoadedJob:
    """A job with what all computations need made ready, on one of its devices.

    Attributes:
        weights_widened: how many of the weights came in 16 bits.
        rows: where dense rows of this device go.
        result_memory_bytes: for what is on its way there.
        checkpointed: whether its state is written at `checkpoints` and read there.
        leading: which devices run its ranges; for the one alone that leads them.
        run: on whose state it runs, which `loaded` and `weights` are of; None is none.
        resized: an estimate's, has a loss see as many rows as all shards have.
    """

    work: Work
    loaded: Loaded
    groups: list[Group]
    readout: Callable[..., Any] | None
    weights: Mapping[str, Tensor]
    weights_widened: int
    tensors: BlobTensors
    device: torch.device
    observer: Observer
    rows: Rows
    rounding: RoundedGradients
    result_memory_bytes: int
    kept: KeptGraphs
    checkpoints: JobCheckpoints
    checkpointed: bool = True
    leading: Leading = ALONE
    run: HeldRun | None = None
    resized: Callable[[Objective], Objective] = lambda objective: objective

    @classmethod
    def of(
        cls,
        work: Work,
        loaded: Loaded,
        tensors: BlobTensors,
        *,
        device: torch.device,
        rows: Rows,
        pace: Pace | None,
        **given: Any,
    ) -> LoadedJob:
        """Read what all computations need of a job.

        Args:
            device: of the registry that its model is of.
            pace: when its state is written.
            given: what else it has.

        Raises:
            GradboxError: the job's parts do not fit the model.
        """
        spec, rounding = work.spec, RoundedGradients(work.spec.transfer)
        readout = built_readout(spec, tensors, device=device)
        weights = {name: tensors.shared(ref) for name, ref in spec.weights.items()}
        widened = widened_weights(weights, loaded.module, transfer=spec.transfer)
        identity = partial(identity_of, work.spec_digest, work.model_version, loaded.devices)
        return cls(
            work=work,
            loaded=loaded,
            groups=input_groups(spec, loaded.methods, tensors),
            readout=readout,
            weights=weights | widened,
            weights_widened=len(widened),
            tensors=tensors,
            device=device,
            rows=rows,
            rounding=rounding,
            checkpoints=JobCheckpoints(
                work, identity=identity, rows=rows, rounding=rounding, pace=pace
            ),
            **given,
        )

    def parts(self, *groups: str, by_samples: bool = False) -> tuple[Range, ...]:
        """Return the ranges that shards are cut into, see `Leading.parts`.

        Args:
            groups: by name; none is all of them.
        """
        inputs = [one for one in self.work.spec.inputs if not groups or one.name in groups]
        return self.leading.parts(inputs, self.tensors, by_samples=by_samples)

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
    are fields of `Receipt`, `metadata` stands beside it. `runs` are how the ranges went.
    `saved_bytes` is what a state takes that was saved, `stored` for which store the file is.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    seconds: Mapping[Phase, float]
    metadata: Mapping[str, str] = field(default_factory=dict)
    runs: Sequence[Run] = ()
    recomputed: Recomputed = NOT_RECOMPUTED
    saved_bytes: int | None = None
    stored: StoredRows | StoredCurvature | None = None


class Compute(Protocol):
    """Computes a job of one kind."""

    def __call__(self, job: LoadedJob, spec: Any) -> Computed: ...
