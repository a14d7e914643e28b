"""What all jobs of a remote model are given alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gradbox.protocol.spec_fields import Transfer

Mode = Literal["eval", "train"]


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The arguments that all jobs of a remote model share; see `gradbox.computations`."""

    model: str  # NAME@VERSION
    seed: int
    output: str | int | None
    readout: Callable[..., Any] | None
    wrt: str | Sequence[str] | None
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp64"]
    retain: int | Literal["auto"]
    transfer: Transfer
    priority: int
    timeout_s: float
    devices: int | Literal["auto"]
    name: str
