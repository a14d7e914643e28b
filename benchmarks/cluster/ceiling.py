"""What the machine allows two devices: the same steps in two processes, against one, and no box.

`python -m benchmarks.cluster.ceiling gradient|rows` computes in one process of one thread. It makes
ready, prints a line, waits for one, and prints the seconds of the step. Two of them that begin
together have half of the work each, as two devices do, but nothing that joins them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import torch
from torch import Tensor

from gradbox_engine import Group, Objective, set_gradient
from gradbox_engine.per_sample import per_sample_gradient
from gradbox_engine.replay.retention import HELD_FACTOR
from gradbox_engine.replay.saved_tensors import SavedTensors
from gradbox_worker.demo import task

Shards = Sequence[Mapping[str, Tensor]]
PROJECTED_TO = 256


def ceiling(*work: str, one: Sequence[str], two: Sequence[str]) -> float:
    """Return how many times as fast two processes are as one.

    Args:
        work: arguments of every process.
        one: further ones of the one that does all.
        two: further ones of each of two that do half.
    """
    return _longest_s(1, [*work, *one]) / _longest_s(2, [*work, *two])


def graph_bytes(towers: Mapping[str, Shards]) -> list[float]:
    """Return what the graph of each shard takes, in the bytes that `retain` counts."""
    model = _model().train()
    parameters = [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]
    known: dict[torch.Size, float] = {}
    found = []
    for shard in (shard for tower in towers.values() for shard in tower):
        shape = shard["input_ids"].shape
        if shape not in known:
            saved = SavedTensors(parameters=parameters)
            with saved.hooks():
                task.mean_pooling(model(**shard)[task.OUTPUT], dict(shard))
            known[shape] = HELD_FACTOR * saved.num_bytes
        found.append(known[shape])
    return found


def main(arguments: list[str]) -> int:
    """Print the seconds of one step."""
    args = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    towers = task.tokenised(task.Size(num_pairs=args.pairs, shard_size=args.shard))
    step = {"gradient": _gradient, "rows": _rows}[args.step](towers, args.retain)
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    step()
    print(time.perf_counter() - begin, flush=True)
    return 0


def _gradient(towers: Mapping[str, Shards], retain: int) -> Callable[[], Any]:
    model = _model().train()

    def step(towers: Mapping[str, Shards]) -> None:
        set_gradient(
            model,
            [Group(name, shards) for name, shards in towers.items()],
            Objective(task.info_nce),
            mode="train",
            output=task.OUTPUT,
            readout=task.mean_pooling,
            retain=retain,
        )

    step({name: shards[:1] for name, shards in towers.items()})  # brings in what is lazy
    return lambda: step(towers)


def _rows(towers: Mapping[str, Shards], retain: int) -> Callable[[], Any]:
    model, shards = _model(), [shard for tower in towers.values() for shard in tower]

    def step() -> None:
        per_sample_gradient(
            model,
            shards,
            lambda z: z.square().sum(1),
            reduce="projection",
            dim=PROJECTED_TO,
            output=task.OUTPUT,
            readout=task.mean_pooling,
        )

    step()  # makes the plans
    return step


def _model() -> torch.nn.Module:
    from transformers import AutoModel

    model: torch.nn.Module = AutoModel.from_pretrained(task.model_folder())
    return model


def _longest_s(num_processes: int, arguments: Sequence[str]) -> float:
    """Return how long the last of so many processes that begin together takes."""
    command = [sys.executable, "-m", "benchmarks.cluster.ceiling", *arguments]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(num_processes)
    ]
    for process in running:
        _pipe(process.stdout).readline()
    for process in running:
        _pipe(process.stdin).write("\n")
        _pipe(process.stdin).flush()
    seconds = [float(process.communicate()[0]) for process in running]
    return max(seconds)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster.ceiling")
    parser.add_argument("step", choices=["gradient", "rows"])
    parser.add_argument("--shard", type=int, required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--retain", type=int, default=0, help="bytes for graphs")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
