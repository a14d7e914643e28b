"""The receipt: what a result says of its own making (safetensors metadata key `gradbox`)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Seconds(BaseModel):
    """Where the time of a job went."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    queued: float = 0.0
    load: float = 0.0
    forward: float = 0.0
    cotangents: float = 0.0
    replay: float = 0.0


class Receipt(BaseModel):
    """What a result says of its own making.

    `names` are the gradients in `named_parameters` order, then those of the loss: a safetensors
    file keeps no order of its own. `unreached` names parameters that the loss does not depend on;
    their gradients are zeros. `replay_difference` is the largest |z' − z| over a shard, relative to
    that shard's largest |z|. `peak_memory_bytes` is the process's peak on a CPU (model included),
    the allocator's on CUDA.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    protocol: int
    job: str
    spec_digest: str
    computation: str
    model: str
    model_version: str
    seed: int
    mode: str
    precision: str
    device: str
    torch: str
    gradbox: str
    loss: float
    shards: dict[str, int]
    shards_retained: int
    shards_replayed: int
    replay_difference: float
    names: tuple[str, ...] = ()
    unreached: list[str] = []
    seconds: Seconds
    peak_memory_bytes: int
    memory_before_bytes: int
    attempts: int = 1
