"""What the engine adds to the kernels, on CUDA: MiniLM in shards of 256.

The plain loop runs the same kernels with no bookkeeping: every shard forward with its graph
dropped, the loss, then every shard forward and backward, but for the last, whose graph is kept.
Wall time of whole steps, the device waited for at their ends alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.measure import interleaved, median_ratio
from benchmarks.page import verdict
from benchmarks.set_loss.pairs import TOWERS
from benchmarks.set_loss.peers import GRADBOX, Outcome, Step, outcome
from benchmarks.set_loss.workloads import Workload
from gradbox.losses import info_nce

SHARD = 256
NUM_PAIRS = 512
NUM_TOKENS = 32
ROUNDS = 10
ALLOWANCE = 1.03


@dataclass(frozen=True)
class Overhead:
    """The engine's wall time to the plain loop's, and the device."""

    ratio: float
    device: str


def measure_overhead() -> Overhead | None:
    """Run the benchmark; None where there is no CUDA device."""
    if not torch.cuda.is_available():
        return None
    workload = Workload(NUM_PAIRS, SHARD, "minilm", NUM_TOKENS, "cuda")
    steps = {"plain": plain_loop(workload), "gradbox": GRADBOX.load(workload)}
    runs = interleaved(steps, rounds=ROUNDS)
    ratio = median_ratio(runs["gradbox"], runs["plain"], cpu=False)
    return Overhead(ratio, torch.cuda.get_device_name())


def overhead_section(found: Overhead | None) -> str:
    """Describe the measurement, or say that there was none."""
    lines = ["## Overhead on a GPU", ""]
    if found is None:
        return "\n".join([*lines, "Not measured: there is no CUDA device here."])
    bar = verdict(
        found.ratio <= ALLOWANCE,
        f"the engine takes {found.ratio:.3f} of the plain loop, allowed {ALLOWANCE}",
    )
    about = (
        f"{NUM_PAIRS} pairs through all-MiniLM-L6-v2, dropout on, shard {SHARD}, {NUM_TOKENS} "
        f"tokens, {found.device}; medians of {ROUNDS} interleaved rounds, wall time."
    )
    return "\n".join([*lines, about, "", f"- {bar}"])


def plain_loop(workload: Workload) -> Step:
    """Return the step with the engine's kernels and nothing else."""
    encoder = workload.encoder()
    places = [(tower, shard) for tower in TOWERS for shard in workload.shards[tower]]

    def step() -> Outcome:
        encoder.zero_grad(set_to_none=True)
        outputs = [encoder(**shard).detach() for _, shard in places[:-1]]
        last = encoder(**places[-1][1])
        outputs.append(last.detach())
        per_tower = len(outputs) // len(TOWERS)
        towers = [
            torch.cat(outputs[start : start + per_tower]).requires_grad_()
            for start in range(0, len(outputs), per_tower)
        ]
        info_nce(*towers).backward()
        cotangents = [
            part
            for z in towers
            if z.grad is not None
            for part in torch.split(z.grad, workload.shard)
        ]
        last.backward(cotangents[-1])
        for (_, shard), cotangent in zip(places[:-1], cotangents[:-1], strict=True):
            encoder(**shard).backward(cotangent)
        return outcome(encoder)

    return step
