"""What one shard costs here, and the page and the picture of what `scale` makes of it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch

from benchmarks.cluster.scale import ENOUGH, NETWORKS, Assumed, Point, ShardCosts, below, curve
from benchmarks.page import MIB, section, table
from benchmarks.set_loss.workloads import SEED, Workload
from gradbox.losses import BUILTIN
from gradbox_engine import Group, Objective, set_gradient
from gradbox_engine.requests import Phase

NUM_SHARDS: Final = 10**6
KEEP_ALL: Final = 2**50
LOSS_ROWS: Final = (2048, 16384)


@dataclass(frozen=True)
class ScalePlan:
    """What is measured here, and what is simulated with it."""

    pairs: int = 64
    shard: int = 8
    num_shards: int = NUM_SHARDS
    assumed: tuple[Assumed, ...] = (Assumed(), Assumed(faster=1.0))


@dataclass(frozen=True)
class Scale:
    """The costs that were measured, and the curves by speed of a device and network."""

    plan: ScalePlan
    costs: ShardCosts
    curves: dict[tuple[float, str], list[Point]] = field(default_factory=dict)


def measure_scale(plan: ScalePlan) -> Scale:
    """Measure a shard, and simulate the rest."""
    costs = measure_costs(plan)
    return Scale(
        plan,
        costs,
        {
            (assumed.faster, network.name): curve(costs, network, assumed, plan.num_shards)
            for assumed in plan.assumed
            for network in NETWORKS
        },
    )


class _Steps:
    """Notes when each shard of a phase ended."""

    def __init__(self) -> None:
        self.at: dict[Phase, list[float]] = {}

    def step(self, phase: Phase, done: int, total: int) -> None:
        self.at.setdefault(phase, []).append(time.perf_counter())


def measure_costs(plan: ScalePlan) -> ShardCosts:
    """Run a few shards of MiniLM in train mode, with no graph kept and with all."""
    torch.set_num_threads(1)
    workload = Workload(plan.pairs, plan.shard)
    encoder = workload.encoder()
    groups = [Group(name=name, shards=shards) for name, shards in workload.shards.items()]
    number = workload.num_shards
    found, steps = {}, _Steps()
    for retain in (0, 0, KEEP_ALL):  # the first call pays for what is imported and planned
        steps.at.clear()
        found[retain] = set_gradient(
            encoder,
            groups,
            Objective(function=_loss, inputs={}, parameters={}),
            retain=retain,
            returns=("grads", "outputs"),
            mode="train",
            seed=SEED,
            observer=steps,
        )
    cold, warm = found[0].ranges[0], found[KEEP_ALL].ranges[0]
    ends = steps.at["forward"]
    of_shard = [b - a for a, b in pairwise(ends)]
    outputs = found[0].outputs or {}
    width = _tensors(outputs)[0].shape[1]
    moved = [t for shard in workload.shards.values() for batch in shard for t in batch.values()]
    return ShardCosts(
        forward_s=cold.forward_s / number,
        replay_s=cold.replay_s / number,
        backward_s=warm.replay_s / number,
        loss_s=_loss_s_a_row(width) * plan.shard / 2,  # a pair has a row in each tower
        spread=statistics.stdev(of_shard) / statistics.mean(of_shard),
        input_bytes=sum(t.nbytes for t in moved) // number,
        output_bytes=sum(z.nbytes for z in _tensors(outputs)) // number,
        sum_bytes=sum(g.nbytes for g in found[0].grads.values()),
    )


def _loss(queries: torch.Tensor, passages: torch.Tensor) -> torch.Tensor:
    return BUILTIN["vicreg"](queries, passages)


def _tensors(z: object) -> list[torch.Tensor]:
    if isinstance(z, torch.Tensor):
        return [z]
    assert isinstance(z, Mapping)
    return [tensor for part in z.values() for tensor in _tensors(part)]


def _loss_s_a_row(width: int) -> float:
    """Return what one more row of both towers costs VICReg and its gradient."""
    seconds = []
    for num_rows in LOSS_ROWS:
        z = [torch.randn(num_rows, width, requires_grad=True) for _ in range(2)]
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            torch.autograd.grad(_loss(*z), z)
            times.append(time.perf_counter() - begin)
        seconds.append(min(times))
    return (seconds[1] - seconds[0]) / (LOSS_ROWS[1] - LOSS_ROWS[0])


def scale_section(found: Scale) -> str:
    """Describe it."""
    plan, costs = found.plan, found.costs
    rows = []
    for (faster, network), points in found.curves.items():
        low = below(points)
        shown = {p.devices: p.efficiency for p in points}
        rows.append(
            [
                f"{faster:g} ×, {network}",
                *(f"{shown[k]:.2f}" for k in (8, 64, 256, 1024)),
                f"{sum(points[-1].seconds.values()):.0f}",
                "none" if low is None else f"{low.devices}: {low.first}",
            ]
        )
    head = [
        "a device to one thread, network",
        *(f"{k} devices" for k in (8, 64, 256, 1024)),
        "1024 devices, s",
        f"first below {ENOUGH}, and by what",
    ]
    return section(
        "Scale",
        f"Simulated: one set gradient of {plan.num_shards:,} shards of {plan.shard} texts "
        "through all-MiniLM-L6-v2 in train mode. Measured here, of a shard on one thread: "
        f"forward {costs.forward_s * 1e3:.0f} ms, replay {costs.replay_s * 1e3:.0f} ms, "
        f"backward of a kept graph {costs.backward_s * 1e3:.0f} ms, loss (VICReg) "
        f"{costs.loss_s * 1e6:.0f} µs; shards {costs.spread:.0%} apart; inputs "
        f"{costs.input_bytes / 1024:.1f} KiB, rows of Z {costs.output_bytes / 1024:.1f} KiB, a "
        f"sum {costs.sum_bytes / MIB:.0f} MiB. Load of the machine: {os.getloadavg()[0]:.1f}. "
        f"Assumed: {_assumed(plan.assumed[0])}.",
        table(head, rows),
    )


def plot_scale(found: Scale, path: Path) -> None:
    """Draw efficiency against the number of devices, a panel for each speed of a device.

    Args:
        path: where to save; the suffix decides the format.
    """
    from matplotlib.figure import Figure

    speeds = list(dict.fromkeys(faster for faster, _ in found.curves))
    figure = Figure(figsize=(4.6 * len(speeds), 3.6), layout="constrained")
    axes = figure.subplots(1, len(speeds), squeeze=False, sharey=True)[0]
    for axis, speed in zip(axes, speeds, strict=True):
        for (faster, network), points in found.curves.items():
            if faster == speed:
                xs, ys = [p.devices for p in points], [p.efficiency for p in points]
                axis.plot(xs, ys, ".-", label=network)
        axis.axhline(ENOUGH, color="0.8", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 1.1)
        axis.set_title(f"a device as fast as {speed:g} threads" if speed > 1 else "one thread each")
        axis.set_xlabel("devices")
        axis.legend(fontsize=7, loc="lower left")
    axes[0].set_ylabel("efficiency")
    figure.savefig(path, dpi=110)


def _assumed(assumed: Assumed) -> str:
    return (
        f"devices {assumed.devices_apart:.0%} apart, {assumed.graphs_kept} graphs kept on each, "
        f"{assumed.call_s * 1e3:g} ms a call of Ray's and {assumed.calls_a_range} a range, "
        f"sums added at {assumed.add_bytes_per_s / 1e12:g} TB/s"
    )
