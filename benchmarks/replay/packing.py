"""Packing by length; `python -m benchmarks.replay.packing METHOD PAIRS TOKENS THREADS` is one peak.

Real sentences are of different lengths, and naive code pads all of them to the longest. `padded` is
one forward of that batch and one backward; `packed` is gradbox's engine, nothing kept, on what
`gradbox.pack` makes of the same batch.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.measure import (
    FRESH,
    in_fresh_process,
    interleaved,
    median_ratio,
    relative_difference,
)
from benchmarks.page import mebibytes, section, table
from benchmarks.set_loss.encoders import Encoder
from benchmarks.set_loss.pairs import TOWERS, Batch
from benchmarks.set_loss.peers import PREFIX, Outcome, Step, outcome
from benchmarks.set_loss.workloads import SEED
from gradbox import pack
from gradbox.losses import info_nce
from gradbox_engine import Group, Objective, set_gradient
from gradbox_worker.computations.memory import PeakMemory
from gradbox_worker.demo.task import model_folder
from gradbox_worker.demo.text import documentation_pairs

LONGEST = 128
METHODS = ("padded", "packed")

Mode = Literal["train", "eval"]


@dataclass(frozen=True)
class PackingPlan:
    """What to measure; `tokens` is what a shard holds, padding included."""

    num_pairs: int
    tokens: int
    rounds: int
    threads: int


@dataclass(frozen=True)
class Packing:
    """Time to the padded batch's, peaks in bytes, the gradients' difference without dropout."""

    plan: PackingPlan
    time: float
    peaks: dict[str, int]
    difference: float
    padded_tokens: int
    packed_tokens: int


def measure_packing(plan: PackingPlan) -> Packing:
    """Run the benchmark."""
    torch.set_num_threads(plan.threads)
    batches = sentences(plan.num_pairs)
    steps = {name: _load(name, batches, plan.tokens, "train") for name in METHODS}
    runs = interleaved(steps, rounds=plan.rounds)
    grads = [_load(name, batches, plan.tokens, "eval")().grads for name in METHODS]
    packed = [pack(batches[tower], tokens=plan.tokens) for tower in TOWERS]
    return Packing(
        plan,
        time=median_ratio(runs["packed"], runs["padded"], cpu=True),
        peaks={name: _fresh(name, plan) for name in METHODS},
        difference=relative_difference(grads[1], grads[0]),
        padded_tokens=sum(batch["input_ids"].numel() for batch in batches.values()),
        packed_tokens=sum(shard["input_ids"].numel() for p in packed for shard in p.shards),
    )


def packing_section(found: Packing) -> str:
    """Describe the measurement."""
    plan = found.plan
    share = found.peaks["packed"] / found.peaks["padded"]
    rows = [
        ["one padded batch", "1.000", mebibytes(found.peaks["padded"]), str(found.padded_tokens)],
        [
            "packed by length, replayed",
            f"{found.time:.3f}",
            mebibytes(found.peaks["packed"]),
            str(found.packed_tokens),
        ],
    ]
    return section(
        "Packing",
        f"{plan.num_pairs} pairs of real sentences of up to {LONGEST} tokens through "
        f"all-MiniLM-L6-v2 in train mode, InfoNCE, {plan.threads} thread(s); shards of "
        f"{plan.tokens} tokens, nothing kept. Medians of {plan.rounds} interleaved rounds, "
        "CPU time; peak memory beyond the model, MiB.",
        table(["", "time", "peak", "tokens"], rows),
        f"Packed, a step takes {found.time:.2f} of the time and {share:.0%} of the memory. "
        f"Without dropout the gradients differ by {found.difference:.0e}.",
    )


def sentences(num_pairs: int) -> dict[str, Batch]:
    """Return both towers' tokens, each padded to its own longest sentence."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder())
    return {
        tower: dict(
            tokenizer(
                [pair[place] for pair in documentation_pairs(num_pairs)],
                padding=True,
                truncation=True,
                max_length=LONGEST,
                return_tensors="pt",
            )
        )
        for place, tower in enumerate(TOWERS)
    }


def _load(method: str, batches: dict[str, Batch], tokens: int, mode: Mode) -> Step:
    encoder = Encoder().train(mode == "train")
    if method == "padded":
        return _padded(encoder, batches)
    packed = {tower: pack(batches[tower], tokens=tokens) for tower in TOWERS}
    groups = [
        Group(name=tower, shards=packed[tower].shards, order=torch.from_numpy(packed[tower].order))
        for tower in TOWERS
    ]

    def step() -> Outcome:
        objective = Objective(function=info_nce)
        grads = set_gradient(encoder, groups, objective, seed=SEED, mode=mode).grads
        return Outcome({name.removeprefix(PREFIX): grad for name, grad in grads.items()})

    return step


def _padded(encoder: Encoder, batches: dict[str, Batch]) -> Step:
    def step() -> Outcome:
        encoder.zero_grad(set_to_none=True)
        info_nce(*(encoder(**batches[tower]) for tower in TOWERS)).backward()
        return outcome(encoder)

    return step


def _fresh(method: str, plan: PackingPlan) -> int:
    sizes = map(str, (plan.num_pairs, plan.tokens, plan.threads))
    return int(
        in_fresh_process("benchmarks.replay.packing", method, *sizes, env=FRESH)["peak_bytes"]
    )


def main(arguments: list[str]) -> int:
    """Print the bytes as JSON."""
    method, num_pairs, tokens, threads = arguments
    torch.set_num_threads(int(threads))
    _load(method, sentences(2), int(tokens), "train")()
    step = _load(method, sentences(int(num_pairs)), int(tokens), "train")
    gc.collect()
    memory = PeakMemory(torch.device("cpu"))
    step()
    peak_bytes, before_bytes = memory.measure()
    print(json.dumps({"peak_bytes": peak_bytes - before_bytes}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
