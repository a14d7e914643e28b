"""Recomputed blocks against whole graphs: `python -m benchmarks.replay.recompute [TASK [MODE]]`.

The tasks are MiniLM in shards of 128 sentences and a decoder of 12 blocks in shards of one text of
1024 tokens, both in train mode with dropout. MODE is the job's `recompute`; each peak is that of a
process of its own, beyond the model, gradients included.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from benchmarks.measure import (
    FRESH,
    Ratio,
    bracketed,
    in_fresh_process,
    return_memory,
    reuse_memory,
)
from benchmarks.page import mebibytes, section, table, verdicts
from benchmarks.set_loss.pairs import TOWERS
from benchmarks.set_loss.workloads import SEED, Workload
from gradbox_engine import Group, Objective, SetGradient, set_gradient
from gradbox_engine.requests import Shard
from gradbox_worker.computations.memory import PeakMemory

TASKS: Final = ("minilm", "decoder")
MODES: Final = ("off", "blocks")
SENTENCES, TOKENS, BLOCKS, WIDTH = 128, 1024, 12, 256
MANY: Final = 2  # shards, of which all but the last one are replayed
ROUNDS: Final = 3
MOST_MEMORY, MOST_TIME = 0.45, 1.35


@dataclass(frozen=True)
class BlockCosts:
    """One task's peaks in bytes by mode, of one shard, and its time with blocks recomputed."""

    task: str
    peaks: Mapping[str, int]
    times: Mapping[int, Ratio]  # by number of shards, to that of whole graphs
    same_bits: bool


def recompute_section(found: list[BlockCosts]) -> str:
    """Describe the measurement."""
    rows, bars = [], []
    for one in found:
        memory = one.peaks["blocks"] / one.peaks["off"]
        rows.append(
            [
                one.task,
                *(mebibytes(one.peaks[mode]) for mode in MODES),
                f"{memory:.2f}",
                *(f"{one.times[n].median:.3f}" for n in (1, MANY)),
                "yes" if one.same_bits else "no",
            ]
        )
        times = max(ratio.median for ratio in one.times.values())
        bars += [
            (memory <= MOST_MEMORY, f"{one.task}: {memory:.2f} x the peak, bar {MOST_MEMORY}"),
            (times <= MOST_TIME, f"{one.task}: {times:.3f} x the time, bar {MOST_TIME}"),
            (one.same_bits, f"{one.task}: the same bits"),
        ]
    return section(
        "Recomputed blocks",
        f'A set gradient with `recompute="blocks"` against "off", nothing kept beyond the last '
        f"shard's graph, dropout on: MiniLM in shards of {SENTENCES} sentences, a decoder of "
        f"{BLOCKS} blocks of width {WIDTH} in shards of one text of {TOKENS} tokens. Peaks in MiB "
        f"of one shard, in a fresh process, beyond the model, gradients included; times as ratios "
        f"of CPU seconds, medians over {ROUNDS} interleaved rounds, one thread.",
        table(
            ["", "whole graph", "blocks", "memory", "time, 1 shard", f"{MANY} shards", "same bits"],
            rows,
        ),
        verdicts(bars),
    )


def _measured(task: str) -> BlockCosts:
    torch.set_num_threads(1)
    reuse_memory()
    peaks = {
        mode: in_fresh_process("benchmarks.replay.recompute", task, mode, env=FRESH)["peak_bytes"]
        for mode in MODES
    }
    times = {}
    for num_shards in (1, MANY):
        whole, blocks = (_step(task, mode, num_shards) for mode in MODES)
        ratios, _ = bracketed({"": blocks}, whole, rounds=ROUNDS, seconds=0, cpu=True)
        times[num_shards] = ratios[""]
    one, other = (_step(task, mode, 2)() for mode in MODES)
    same = all(torch.equal(g, other.grads[name]) for name, g in one.grads.items())
    return BlockCosts(task, peaks, times, same)


def _step(task: str, mode: str, num_shards: int) -> Callable[[], SetGradient]:
    model, shards = (_minilm if task == "minilm" else _decoder)(num_shards)

    output = None if task == "minilm" else "last_hidden_state"

    def step() -> SetGradient:
        return set_gradient(
            model,
            [Group("z", shards)],
            Objective(_spread),
            seed=SEED,
            mode="train",
            output=output,
            recompute=mode,
        )

    return step


def _spread(z: Tensor) -> Tensor:
    flat = z.flatten(1)
    scaled: Tensor = flat @ flat.T / flat.shape[1] ** 0.5
    return scaled.tanh().mean()


def _minilm(num_shards: int) -> tuple[nn.Module, list[Shard]]:
    workload = Workload(SENTENCES * num_shards, SENTENCES)
    return workload.encoder(), list(workload.shards[TOWERS[0]])


def _decoder(num_shards: int) -> tuple[nn.Module, list[Shard]]:
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=1000, n_positions=TOKENS, n_embd=WIDTH, n_layer=BLOCKS, n_head=4, use_cache=False
    )
    ids = torch.randint(1000, (num_shards, TOKENS))
    return GPT2Model(config), [{"input_ids": row} for row in ids.split(1)]


def main(arguments: list[str]) -> int:
    """Print the bytes of one shard's peak as JSON; without MODE, the section of the tasks."""
    if len(arguments) < 2:
        print(recompute_section([_measured(task) for task in arguments or TASKS]))
        return 0
    task, mode = arguments
    torch.set_num_threads(1)
    step = _step(task, mode, 1)
    step()  # pages in the code
    gc.collect()
    return_memory()
    memory = PeakMemory(torch.device("cpu"))
    step()
    peak_bytes, before_bytes = memory.measure()
    print(json.dumps({"peak_bytes": peak_bytes - before_bytes}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
