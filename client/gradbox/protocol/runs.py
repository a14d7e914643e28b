"""Runs: training on the box. What makes one, what it says of itself, and the seeds of its steps.

A run is made by a `RunSpec`. Each of its steps is a job, a `StepSpec`, posted by its number; what
model, mode, precision and seed it has is the run's.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints

from gradbox.graphs.wire_form import NUMBER, Items
from gradbox.protocol.optimizers import OptimizerSpec
from gradbox.protocol.options import Mode, Name, Precision, Seed
from gradbox.protocol.spec_fields import PROTOCOL, JobId, SaveName, StateRef, Wire
from gradbox.protocol.views import View

SEED_BYTES: Final = 8
StepNumber = Annotated[int, Field(ge=0, lt=2**53), NUMBER]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=500)]


def step_seed(seed: int, step: int) -> int:
    """Return the seed of a run's step: that of the job which computes its gradient.

        with shard_stream(step_seed(run.seed, n), group=0, shard=i):
            z = model(x)  # with the masks of step n

    Args:
        seed: of the run.
        step: its number, 1 for the first.

    Source: the first 8 bytes of the SHA-256 of "gradbox-step:SEED:STEP", of which one bit is left
    out, so that every language's integers hold it.
    """
    text = f"gradbox-step:{seed}:{step}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:SEED_BYTES], "big") >> 1


class LoRASpec(Wire, frozen=True):
    """An adapter of low rank beside the layers that `targets` names, on weights that stay.

    W x + (alpha / rank) B A dropout(x), with A (rank, in), B (out, rank), B = 0 at first.
    Source: Hu et al., LoRA, 2021; made by peft.
    """

    kind: Literal["lora"] = "lora"
    rank: Annotated[int, Field(ge=1, le=4096), NUMBER]
    alpha: Annotated[float, Field(gt=0), NUMBER]
    targets: Annotated[Items[Pattern], Field(min_length=1)]
    dropout: Annotated[float, Field(ge=0, lt=1), NUMBER] = 0.0


class RunSpec(Wire, frozen=True):
    """A run as it is posted to /v1/runs."""

    protocol: Annotated[Literal[1], NUMBER] = PROTOCOL
    model: Annotated[str, StringConstraints(min_length=1, max_length=300)]
    optimizer: OptimizerSpec
    wrt: Annotated[Items[Pattern], Field(min_length=1)] | None = None
    adapter: LoRASpec | None = None
    mode: Mode = "train"
    precision: Precision = "fp32"
    seed: Seed = 0
    name: Name = ""
    start: StateRef | None = None
    start_moments: bool = True


class SaveOrder(Wire, frozen=True):
    """A state to be saved, as it is posted: that after step `step`, or the newest."""

    name: SaveName
    step: StepNumber | None = None
    shared: bool = False


class SaveView(View):
    """A state that was saved under a name, and stays until it is deleted; `shared` with the lab."""

    name: str
    run: JobId
    step: int
    created_s: float
    size_bytes: int
    shared: bool = False


class StepView(View):
    """One step of a run that was made. `seconds` is what its job took on the device.

    `loss` is None where the step was at cotangents of a loss that was computed elsewhere.
    """

    number: int
    job: JobId
    loss: float | None = None
    grad_norm: float
    lr: list[float]
    seconds: float
    finished_s: float


class RunView(View):
    """One run. `num_steps` were made; `state_step` is the newest one that is on disk.

    `under_way` is the job of the step that follows, from its post to its end. `loss` and
    `grad_norm` are those of the last step. `state_bytes` count against the owner's quota, as do
    those of `saves`.
    """

    id: JobId
    name: str = ""
    owner: str
    model: str
    model_version: str
    optimizer: dict[str, Any]
    wrt: list[str] | None = None
    adapter: dict[str, Any] | None = None
    mode: str
    precision: str
    seed: int
    num_steps: int = 0
    under_way: JobId | None = None
    loss: float | None = None
    grad_norm: float | None = None
    created_s: float
    last_step_s: float | None = None
    state_step: int | None = None
    state_bytes: int = 0
    saves: list[SaveView] = []


class RunList(View):
    """A page of runs, newest first. `next` is the cursor of the page behind it."""

    runs: list[RunView]
    next: str | None = None


class History(View):
    """Steps of a run in their order."""

    steps: list[StepView]
