"""A step that trains a real model through a box, against the same step on a local one.

all-MiniLM-L6-v2 in train mode on eight sentences: the forward pass on the box, a loss and an
optimizer here, the backward pass on the box; the last block is trained, and then all of it. Every
step changes every weight that is trained. One worker with one thread on the CPU, over loopback;
remote and local steps take turns in blocks, wall time, medians; requests and processor time are of
one block, after the first.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.box.small_jobs import Costs, Meter, metered_box
from benchmarks.page import MIB, section, table, verdicts
from gradbox import GradClient
from gradbox.inputs.uploads import PACK_BYTES
from gradbox_worker.demo import task

SENTENCES: Final = ["a red fox jumps over a lazy dog and runs away"] * 8
TRAINED: Final = {"the last block": "encoder.layer.5.*", "all parameters": "*"}
NUM_STEPS: Final = {"the last block": 30, "all parameters": 6}
ROUNDS: Final = 3
LEARNING_RATE: Final = 0.001


@dataclass(frozen=True)
class Steps:
    """What was measured of one set of trained parameters."""

    trained: str
    num_bytes: int
    remote: Costs
    local_ms: float


def measure_training_steps() -> list[Steps]:
    """Run the benchmark."""
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    tokenizer: Any = AutoTokenizer.from_pretrained(task.model_folder())
    shard = dict(tokenizer(SENTENCES, return_tensors="pt"))
    with (
        tempfile.TemporaryDirectory(prefix="gradbox-steps-") as name,
        metered_box(Path(name)) as (client, meter),
    ):
        return [_measured(trained, client, meter, shard) for trained in TRAINED]


def training_steps_section(found: list[Steps]) -> str:
    """Describe the benchmark."""
    rows = [
        [
            one.trained,
            f"{one.num_bytes / MIB:.1f}",
            f"{one.remote.median_ms:.0f}",
            f"{one.local_ms:.0f}",
            f"{one.remote.num_requests:.1f}",
            f"{one.remote.num_commands:.0f}",
            *(f"{one.remote.cpu_ms.get(role, 0.0):.0f}" for role in sorted(one.remote.cpu_ms)),
        ]
        for one in found
    ]
    roles = [f"{role}, CPU ms" for role in sorted(found[0].remote.cpu_ms)]
    head = ["trained", "MiB", "remote, ms", "local, ms", "requests", "Redis commands", *roles]
    few = all(one.remote.num_requests <= 3 + math.ceil(one.num_bytes / PACK_BYTES) for one in found)
    sentence = (
        f"a step takes 2 requests for each half, and one more for every further "
        f"{PACK_BYTES // MIB} MiB that changed"
    )
    return section(
        "Training steps",
        "all-MiniLM-L6-v2 in train mode on eight sentences, one thread; every step changes all "
        f"that is trained. Load of the machine {os.getloadavg()[0]:.1f}.",
        table(head, rows),
        verdicts([(few, sentence)]),
    )


def _measured(trained: str, client: GradClient, meter: Meter, shard: dict[str, Tensor]) -> Steps:
    remote, num_bytes = _remote_step(client, TRAINED[trained], shard)
    local = _local_step(TRAINED[trained], shard)
    for _ in range(3):
        remote(), local()
    meter.rest()
    blocks, local_ms = [], []
    for _ in range(ROUNDS):
        blocks.append(meter.measure(remote, NUM_STEPS[trained]))
        local_ms += meter.measure(local, NUM_STEPS[trained]).times_ms
    times_ms = [took for block in blocks for took in block.times_ms]
    return Steps(
        trained, num_bytes, replace(blocks[1], times_ms=times_ms), statistics.median(local_ms)
    )


def _remote_step(
    client: GradClient, wrt: str, shard: dict[str, Tensor]
) -> tuple[Callable[[], None], int]:
    weights = {name: p.detach().clone() for name, p in trained(local_model(), wrt).items()}
    model = client.model(task.MODEL, mode="train", wrt=wrt, output=task.OUTPUT, weights=weights)

    def step() -> None:
        model.zero_grad()
        model(shard).square().mean().backward()
        for name, gradient in model.grads.items():
            weights[name] -= LEARNING_RATE * gradient

    return step, sum(weight.nbytes for weight in weights.values())


def _local_step(wrt: str, shard: dict[str, Tensor]) -> Callable[[], None]:
    model = local_model()
    model.requires_grad_(False)
    parameters = list(trained(model, wrt).values())
    for parameter in parameters:
        parameter.requires_grad_()
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        model(**shard).last_hidden_state.square().mean().backward()
        optimizer.step()

    return step


def local_model() -> Any:
    """Return the box's model in train mode."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(task.model_folder()).train()


def trained(model: Any, wrt: str) -> dict[str, Tensor]:
    """Return the parameters that are trained; the pooler has no part in the output."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if fnmatchcase(name, wrt) and not name.startswith("pooler.")
    }
