"""Peak memory and time of one step of one peer, by

    python -m benchmarks.set_loss.memory PEER --pairs 64 …

A process of its own for each figure, because an allocator keeps what an earlier step needed. The
model and the samples are loaded before the measurement begins, and a step on sixteen pairs in
shards of one brings in the code that a first step would page in; the gradients are part of the
figure.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from subprocess import CalledProcessError

import torch

from benchmarks.measure import FRESH, in_fresh_process, return_memory
from benchmarks.set_loss.public_peers import peer_named
from benchmarks.set_loss.workloads import Workload
from gradbox_worker.computations.memory import PeakMemory


@dataclass(frozen=True)
class StepCost:
    """Of one step in a fresh process: peak memory beyond the loaded model, and wall time."""

    peak_bytes: int
    seconds: float


def peak_bytes(peer: str, workload: Workload, *, threads: int, kept: int = 0) -> int | None:
    """Return the peak of `step_cost`; None when the process did not live to say it."""
    cost = step_cost(peer, workload, threads=threads, kept=kept)
    return None if cost is None else cost.peak_bytes


def step_cost(
    peer: str,
    workload: Workload,
    *,
    threads: int,
    kept: int = 0,
    env: Mapping[str, str] = FRESH,
) -> StepCost | None:
    """Measure one step in a fresh process; None when that did not live to say it.

    Args:
        kept: how many graphs gradbox may keep.
        env: that process's; as it is, memory is given back at once, which costs time.
    """
    options = {
        "kept": kept,
        "task": workload.task,
        "pairs": workload.num_pairs,
        "shard": workload.shard,
        "num-tokens": workload.num_tokens,
        "threads": threads,
        "device": workload.device,
    }
    given = [f"--{option}={value}" for option, value in options.items()]
    try:
        found = in_fresh_process("benchmarks.set_loss.memory", peer, *given, env=env)
    except CalledProcessError:
        return None
    return StepCost(int(found["peak_bytes"]), found["seconds"])


def main(arguments: list[str]) -> int:
    """Print the bytes and the seconds as JSON."""
    args = _parser().parse_args(arguments)
    torch.set_num_threads(args.threads)
    workload = Workload(args.pairs, args.shard, args.task, args.num_tokens, args.device)
    peer_named(args.peer, kept=0).load(replace(workload, num_pairs=16, shard=1))()
    step = peer_named(args.peer, kept=args.kept).load(workload)
    assert workload.batches
    assert workload.shards
    gc.collect()
    return_memory()
    memory = PeakMemory(torch.device(args.device))
    begin = time.perf_counter()
    step()
    seconds = time.perf_counter() - begin
    peak_bytes, before_bytes = memory.measure()
    print(json.dumps({"peak_bytes": peak_bytes - before_bytes, "seconds": seconds}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.set_loss.memory", description=__doc__
    )
    parser.add_argument("peer")
    parser.add_argument("--kept", type=int, default=0, help="graphs that gradbox may keep")
    parser.add_argument("--task", default="minilm")
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--shard", type=int, required=True)
    parser.add_argument("--num-tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
