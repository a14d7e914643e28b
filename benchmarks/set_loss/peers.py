"""Who computes the gradient: naive code, public implementations, gradbox's engine.

A peer's `load` makes a step: a callable that computes one gradient from scratch. `streams` says by
which random numbers its dropout draws, so that the reference can draw the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from benchmarks.set_loss.pairs import TOWERS
from benchmarks.set_loss.workloads import SEED, Workload, gradients
from gradbox.losses import info_nce
from gradbox_engine import Group, Objective, set_gradient, shard_stream
from gradbox_engine.replay.retention import HELD_FACTOR
from gradbox_engine.replay.saved_tensors import SavedTensors
from gradbox_engine.requests import Retain

Streams = Literal["whole batch", "in order", "second pass", "by shard"]

PREFIX = "model."  # of the names in an encoder, see `encoders`
NUM_UPDATES = "num_batches_tracked"


class Unavailable(Exception):
    """A peer cannot run here; the message says why, and how to get it if that is possible."""


@dataclass(frozen=True)
class Outcome:
    """Gradients, and the buffers that the step leaves, by their names in an encoder's model."""

    grads: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_updates(self) -> int | None:
        """How often the step advanced batch-norm statistics; None if there are none."""
        counts = {int(b) for name, b in self.buffers.items() if name.endswith(NUM_UPDATES)}
        return max(counts, default=None)


Step = Callable[[], Outcome]


@dataclass(frozen=True)
class Peer:
    """One way to compute the gradient."""

    name: str
    load: Callable[[Workload], Step]
    streams: Streams


def outcome(encoder: nn.Module) -> Outcome:
    """Return what a step has left in an encoder."""
    buffers = {n.removeprefix(PREFIX): b.clone() for n, b in encoder.named_buffers()}
    return Outcome(gradients(encoder, prefix=PREFIX), buffers)


def naive(workload: Workload) -> Step:
    """One forward over the whole batch, one backward."""
    encoder = workload.encoder()

    def step() -> Outcome:
        encoder.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        info_nce(*(encoder(**workload.batches[tower]) for tower in TOWERS)).backward()
        return outcome(encoder)

    return step


def sharded(
    workload: Workload, prepare: Callable[[nn.Module], None] = lambda encoder: None
) -> Step:
    """Every shard's forward, all graphs alive, one backward: what replay avoids.

    `prepare` may change how the encoder keeps its activations.
    """
    encoder = workload.encoder()
    prepare(encoder)

    def step() -> Outcome:
        encoder.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        embeddings = (
            torch.cat([encoder(**shard) for shard in workload.shards[tower]]) for tower in TOWERS
        )
        info_nce(*embeddings).backward()
        return outcome(encoder)

    return step


def gradbox(workload: Workload, *, kept: int = 0) -> Step:
    """gradbox's engine, with memory for the graphs of so many shards; for all, what is free."""
    encoder = workload.encoder()
    groups = [Group(name=tower, shards=workload.shards[tower]) for tower in TOWERS]
    everything = kept >= workload.num_shards
    retain: Retain = "auto" if everything else retained_bytes(encoder, workload, kept=kept)

    def step() -> Outcome:
        answer = set_gradient(
            encoder,
            groups,
            Objective(function=info_nce),
            seed=SEED,
            mode="train",
            retain=retain,
            returns=("grads", "buffers"),
        )
        if answer.retained < min(kept, workload.num_shards):
            raise RuntimeError(f"expected {kept} graphs to be kept, got {answer.retained}")
        return Outcome(_bare(answer.grads), _bare(answer.buffers or {}))

    return step


def retained_bytes(encoder: nn.Module, workload: Workload, *, kept: int) -> int:
    """Return the budget that holds the graphs of `kept` shards and not one more."""
    if kept == 0:
        return 0
    saved = SavedTensors(
        parameters={p.untyped_storage().data_ptr() for p in encoder.parameters()},
    )
    state = {name: buffer.clone() for name, buffer in encoder.named_buffers()}
    with saved.hooks():
        encoder(**workload.shards[TOWERS[0]][0])
    encoder.load_state_dict(state, strict=False)
    return round(saved.num_bytes * HELD_FACTOR * (kept + 0.5))


def _bare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


NAIVE = Peer("naive", naive, "whole batch")
SHARDED = Peer("naive, sharded", sharded, "in order")
GRADBOX = Peer("gradbox", gradbox, "by shard")


def keeping(kept: int) -> Peer:
    """Return gradbox with memory for the graphs of so many shards."""
    return Peer(f"gradbox, {kept} kept", partial(gradbox, kept=kept), "by shard")


def reference(workload: Workload, streams: Streams) -> dict[str, Tensor]:
    """Return the gradient over one graph of all shards, with a peer's own dropout masks."""
    if streams == "whole batch":
        return naive(workload)().grads
    encoder = workload.encoder()
    torch.manual_seed(SEED)
    positions = [
        (group, shard) for group in range(len(TOWERS)) for shard in range(_per_tower(workload))
    ]
    if streams == "second pass":  # pair by pair: a shard of one tower, then of the other
        positions.sort(key=lambda position: position[::-1])
        with torch.no_grad():
            for group, shard in positions:
                encoder(**workload.shards[TOWERS[group]][shard])
    outputs = {}
    for group, shard in positions:
        arguments = workload.shards[TOWERS[group]][shard]
        if streams == "by shard":
            with shard_stream(SEED, group, shard):
                outputs[group, shard] = encoder(**arguments)
        else:
            outputs[group, shard] = encoder(**arguments)
    embeddings = (
        torch.cat([outputs[group, shard] for shard in range(_per_tower(workload))])
        for group in range(len(TOWERS))
    )
    info_nce(*embeddings).backward()
    return gradients(encoder, prefix=PREFIX)


def _per_tower(workload: Workload) -> int:
    return workload.num_shards // len(TOWERS)
