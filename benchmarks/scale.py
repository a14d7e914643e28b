"""A plan past this machine: one set gradient of 10⁶ shards on 1 to 1024 devices, simulated.

    T(k) = max(inputs, forward) + gather Z + loss + scatter dL/dZ + replay + sums + calls

forward, replay   the slowest of k ranges of N/k shards, each shard and each device a little apart
inputs, Z, dL/dZ  all of them over the one link of the box's machine
loss              on the box, in proportion to the rows of Z
sums              a binary tree, neighbours in one machine first; the last one to the box
calls             what the box spends on Ray's calls, one after the other

Efficiency is T(1) / (k T(k)). It may exceed 1, for with k devices k times as many graphs are kept,
whose shards need no second forward.

Measured on this machine: seconds of a shard in each phase, how far shards are apart, bytes of
everything. Assumed, and said in the report: the networks, how much faster a device is than one
thread of this machine, how far devices are apart, what one of Ray's calls costs.

Not simulated: a lost device, other jobs on the network, reading the inputs from disk.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy
import torch

from benchmarks.page import MIB, table
from benchmarks.workloads import SEED, Workload
from gradbox.losses import BUILTIN
from gradbox_engine import Group, Objective
from gradbox_engine.ranges import Range, set_gradient_in_ranges
from gradbox_engine.requests import Phase

NUM_SHARDS: Final = 10**6
DEVICES: Final = tuple(2**power for power in range(11))
ENOUGH: Final = 0.9
KEEP_ALL: Final = 2**50
DRAWS: Final = 20
LOSS_ROWS: Final = (2048, 16384)


@dataclass(frozen=True)
class ShardCosts:
    """One shard on one thread of this machine, and what moves; the loss is by shard too."""

    forward_s: float
    replay_s: float
    backward_s: float  # of a shard whose graph was kept
    loss_s: float
    spread: float  # standard deviation over mean of a shard's forward
    input_bytes: int
    output_bytes: int
    sum_bytes: int  # of one sum of all gradients


@dataclass(frozen=True)
class Network:
    """Links of so many bytes a second, between devices of one machine and between machines."""

    name: str
    inside: float
    between: float
    devices_a_machine: int = 8
    latency_s: float = 5e-5


NETWORKS: Final = (
    Network("NVLink throughout", inside=400e9, between=400e9, latency_s=1e-5),
    Network("100 Gbit/s between machines", inside=400e9, between=12.5e9),
    Network("25 Gbit/s between machines", inside=400e9, between=3.125e9),
)


@dataclass(frozen=True)
class Assumed:
    """What this machine cannot tell."""

    faster: float = 300.0  # a device than one thread here
    devices_apart: float = 0.02  # standard deviation over mean of their speeds
    call_s: float = 1.3e-3
    calls_a_range: int = 4
    graphs_kept: int = 500  # on one device
    add_bytes_per_s: float = 1e12  # of a device that adds sums up


@dataclass(frozen=True)
class Point:
    """One number of devices: seconds by part, and what they would be in proportion."""

    devices: int
    seconds: dict[str, float]
    efficiency: float
    first: str  # the part that costs most beyond its share of one device's time


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


def curve(
    costs: ShardCosts,
    network: Network,
    assumed: Assumed,
    num_shards: int,
    *,
    devices: Sequence[int] = DEVICES,
) -> list[Point]:
    """Simulate a job on each number of devices."""
    one = job_seconds(costs, network, assumed, num_shards, 1)
    alone_s = sum(one.values())
    points = []
    for k in devices:
        seconds = job_seconds(costs, network, assumed, num_shards, k)
        beyond = {name: s - one[name] / k for name, s in seconds.items()}
        points.append(
            Point(
                devices=k,
                seconds=seconds,
                efficiency=alone_s / (k * sum(seconds.values())),
                first=max(beyond, key=lambda name: beyond[name]),
            )
        )
    return points


def job_seconds(
    costs: ShardCosts, network: Network, assumed: Assumed, num_shards: int, devices: int
) -> dict[str, float]:
    """Return the seconds of each part of a job."""
    moves = devices > 1
    link = network.between if devices > network.devices_a_machine else network.inside
    shards = num_shards / devices
    kept = min(shards, assumed.graphs_kept)
    slowest = _slowest(shards, costs.spread, assumed.devices_apart, devices)
    forward_s = slowest * shards * costs.forward_s / assumed.faster
    second_s = kept * costs.backward_s + (shards - kept) * costs.replay_s
    outputs_s = num_shards * costs.output_bytes / link if moves else 0.0
    inputs_s = num_shards * costs.input_bytes / link if moves else 0.0
    return {
        "forward": forward_s,
        "inputs": max(0.0, inputs_s - forward_s),  # they come while the first shards run
        "Z and dL/dZ": 2 * outputs_s,
        "loss": num_shards * costs.loss_s / assumed.faster,
        "replay": slowest * second_s / assumed.faster,
        "sums": _reduction_s(costs.sum_bytes, network, assumed, devices),
        "calls": devices * assumed.calls_a_range * assumed.call_s if moves else 0.0,
    }


def _slowest(shards: float, spread: float, apart: float, devices: int) -> float:
    """Return the mean over draws of the slowest range's time, relative to the mean one's."""
    draw = numpy.random.default_rng(devices)
    of_range = 1 + spread / math.sqrt(shards) * draw.standard_normal((DRAWS, devices))
    of_device = 1 + apart * draw.standard_normal((DRAWS, devices))
    if devices == 1:
        return 1.0
    return float((of_range * of_device).max(axis=1).mean())


def _reduction_s(sum_bytes: int, network: Network, assumed: Assumed, devices: int) -> float:
    if devices == 1:
        return 0.0
    inside = min(devices, network.devices_a_machine).bit_length() - 1
    levels = math.ceil(math.log2(devices))
    link = network.between if devices > network.devices_a_machine else network.inside
    seconds = inside * sum_bytes / network.inside + (levels - inside) * sum_bytes / network.between
    adding = levels * 3 * sum_bytes / assumed.add_bytes_per_s  # two are read, one is written
    return seconds + adding + (levels + 1) * network.latency_s + sum_bytes / link


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
        found[retain] = set_gradient_in_ranges(
            encoder,
            [Range(0, 1, 0, number)],
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


def below(points: Sequence[Point]) -> Point | None:
    """Return the first point whose efficiency is too low, if there is one."""
    return next((point for point in points if point.efficiency < ENOUGH), None)


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
    return "\n".join(
        [
            "## Scale",
            "",
            f"Simulated: one set gradient of {plan.num_shards:,} shards of {plan.shard} texts "
            "through all-MiniLM-L6-v2 in train mode. Measured here, of a shard on one thread: "
            f"forward {costs.forward_s * 1e3:.0f} ms, replay {costs.replay_s * 1e3:.0f} ms, "
            f"backward of a kept graph {costs.backward_s * 1e3:.0f} ms, loss (VICReg) "
            f"{costs.loss_s * 1e6:.0f} µs; shards {costs.spread:.0%} apart; inputs "
            f"{costs.input_bytes / 1024:.1f} KiB, rows of Z {costs.output_bytes / 1024:.1f} KiB, a "
            f"sum {costs.sum_bytes / MIB:.0f} MiB. Load of the machine: {os.getloadavg()[0]:.1f}. "
            "Assumed: " + "; ".join(_assumed(a) for a in plan.assumed[:1]) + ".",
            "",
            *table(
                [
                    "a device to one thread, network",
                    *(f"{k} devices" for k in (8, 64, 256, 1024)),
                    "1024 devices, s",
                    f"first below {ENOUGH}, and by what",
                ],
                rows,
            ),
        ]
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
