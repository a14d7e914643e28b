"""Peak memory under eager penalties: `python -m benchmarks.replay.penalties NUM METHOD`.

Eight transformer layers, of which the last NUM outputs carry a penalty that needs ten times the
output's own memory; one alone is at the last layer, where the most is alive beside it. METHOD is
`eager`, gradbox's, or `added`, the same terms added to the loss in naive code. One figure a
process, as in `memory`.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from benchmarks.measure import FRESH, in_fresh_process
from benchmarks.page import mebibytes, section, table, verdicts
from gradbox_engine import Group, Objective, Penalty, set_gradient
from gradbox_worker.computations.memory import PeakMemory

NUM_LAYERS = 8
WIDTH = 256
LENGTH = 64
SHARD = 16
NUM_SHARDS = 4
TIMES = 10
WEIGHT = 1e-3
ALLOWANCE = 0.10
METHODS = ("eager", "added")


@dataclass(frozen=True)
class PenaltyPeaks:
    """Peaks in bytes by method and number of penalties."""

    peaks: dict[str, dict[int, int]]


def measure_penalties() -> PenaltyPeaks:
    """Measure no penalty, one, and one at every layer, each way."""
    counts = (0, 1, NUM_LAYERS)
    return PenaltyPeaks({m: {count: _fresh(count, m) for count in counts} for m in METHODS})


def penalty_section(found: PenaltyPeaks) -> str:
    """Describe the measurement."""
    counts = sorted(found.peaks["eager"])
    more = found.peaks["eager"][NUM_LAYERS] / found.peaks["eager"][1] - 1
    sentence = (
        f"the peak with {NUM_LAYERS} penalties is {more:+.1%} of the peak with one, allowed "
        f"{ALLOWANCE:.0%}"
    )
    rows = [
        [name, *(mebibytes(found.peaks[method][count]) for count in counts)]
        for name, method in zip(("eager, by gradbox", "added to the loss"), METHODS, strict=True)
    ]
    return section(
        "Penalties",
        f"{NUM_LAYERS} transformer layers of width {WIDTH}, {NUM_SHARDS} shards of {SHARD} "
        f"sequences of {LENGTH}; a penalty needs {TIMES} times its layer's output, and one "
        "alone is at the last layer. Peak memory beyond the model, MiB, nothing kept; added to "
        "the loss, one shard at a time.",
        table(["penalties", *map(str, counts)], rows),
        verdicts([(more <= ALLOWANCE, sentence)]),
    )


def _fresh(count: int, method: str) -> int:
    found = in_fresh_process("benchmarks.replay.penalties", str(count), method, env=FRESH)
    return int(found["peak_bytes"])


class Layers(nn.Module):
    """A stack of transformer layers: (B, T, D) to (B, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
            for _ in range(NUM_LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


@cache
def _frequencies() -> Tensor:
    return torch.arange(1.0, TIMES + 1)


def penalty(tap_BTD: Tensor) -> Tensor:
    """Return the mean square of the tap's sine at ten frequencies: ten times the tap's size."""
    return (tap_BTD.unsqueeze(-1) * _frequencies()).sin().square().mean()


def _penalised(count: int) -> range:
    return range(NUM_LAYERS - count, NUM_LAYERS)


def _eager(model: nn.Module, shards: list[Tensor], count: int) -> None:
    set_gradient(
        model,
        [Group(name="z", shards=[{"x": shard} for shard in shards])],
        Objective(function=lambda z: z.square().mean()),
        mode="train",
        penalties=[Penalty(f"layers.{layer}", penalty, WEIGHT) for layer in _penalised(count)],
    )


def _added(model: nn.Module, shards: list[Tensor], count: int) -> None:
    taps: list[Tensor] = []
    for index in _penalised(count):
        layer = model.get_submodule(f"layers.{index}")
        layer.register_forward_hook(lambda _module, _inputs, output: taps.append(output))
    for shard in shards:
        loss = model(shard).square().mean()
        (loss + WEIGHT * sum((penalty(tap) for tap in taps), torch.zeros(()))).backward()
        taps.clear()
        del loss


def main(arguments: list[str]) -> int:
    """Print the bytes as JSON."""
    count, method = int(arguments[0]), arguments[1]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = _eager if method == "eager" else _added
    run(Layers().train(), [torch.randn(1, 2, WIDTH)], 1)  # pages in the code
    model = Layers().train()
    shards = [torch.randn(SHARD, LENGTH, WIDTH) for _ in range(NUM_SHARDS)]
    gc.collect()
    memory = PeakMemory(torch.device("cpu"))
    run(model, shards, count)
    peak_bytes, before_bytes = memory.measure()
    print(json.dumps({"peak_bytes": peak_bytes - before_bytes}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
