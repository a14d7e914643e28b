"""A plan past this machine: one set gradient of 10⁶ shards on 1 to 1024 devices, simulated.

    T(k) = max(inputs, forward) + gather Z + loss + scatter dL/dZ + replay + sums + calls

forward, replay   the slowest of k ranges of N/k shards, each shard and each device a little apart
inputs, Z, dL/dZ  all of them over the one link of the box's machine
loss              on the box, in proportion to the rows of Z
sums              a binary tree, neighbours in one machine first; the last one is on the box's
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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy

DEVICES: Final = tuple(2**power for power in range(11))
ENOUGH: Final = 0.9
DRAWS: Final = 20


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
    seconds = inside * sum_bytes / network.inside + (levels - inside) * sum_bytes / network.between
    adding = levels * 3 * sum_bytes / assumed.add_bytes_per_s  # two are read, one is written
    return seconds + adding + levels * network.latency_s


def below(points: Sequence[Point]) -> Point | None:
    """Return the first point whose efficiency is too low, if there is one."""
    return next((point for point in points if point.efficiency < ENOUGH), None)
