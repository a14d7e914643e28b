"""One job over two CPU devices of one thread each, against one of them, on one box.

The box runs on a Ray cluster of two CPU actors on this machine. A round is one job on each number
of devices, in turn; times run from submit until the gradients are in the client's hands. All jobs
must give the same gradients. Jobs of a trivial model tell what an actor adds to a plain device
process, whose box runs beside the other, idle, meanwhile. The ceiling of a speed-up is that of the
machine: two processes that compute the same without a box, against one, once in every round.

The first jobs that project rows make the plans for their shards' shapes, on one device and on two;
the plans are of their readout, so every one of them has a readout of its own. Later jobs find them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.cluster.ceiling import PROJECTED_TO, ceiling, graph_bytes
from benchmarks.cluster.reduction import Reduction, measure_reduction
from benchmarks.measure import median_of_ratios, relative_difference
from benchmarks.page import MIB, section, table, verdicts
from benchmarks.source_trees import ROOT
from gradbox import GradClient, Gradient, GradResult, PerSampleGradient
from gradbox_worker.demo import task
from gradbox_worker.demo.box import running_box

SAME: Final = 1e-5  # float32, another order of the sum
Ceiling = Callable[[], float]

DEVICES: Final = (1, 2)
NUM_TRIVIAL: Final = 50
TRIVIAL: Final = """
[models.two_layers]
builder = "python"
source = "{}:build"
"""

# What DESIGN.md and the issue ask for.
SPEED_UP: Final = 1.8
OF_CEILING: Final = 0.92
FIRST_ROWS: Final = 1.3
SPEED_UP_WITH_GRAPHS: Final = 2.3
OVERHEAD_S: Final = 0.010
MOVED: Final = 1.1  # times the least
OF_COPY: Final = 0.5
# The steps whose ceiling is measured are so many times fewer than the jobs'.
CEILING_PART: Final = 4
ALL: Final = 2**50


@dataclass(frozen=True)
class ClusterPlan:
    """What to measure."""

    num_pairs: int
    shard: int
    rounds: int
    num_samples: int = 2000  # whose rows are projected


@dataclass(frozen=True)
class Timing:
    """Seconds of the rounds on one device and on two, and what one receipt says."""

    one_s: list[float]
    two_s: list[float]
    retained: tuple[int, int]
    bytes_moved: dict[str, int]
    result_bytes: int  # of the sums of gradients
    ceilings: list[float]

    @property
    def speed_up(self) -> float:
        """The median of the rounds' ratios."""
        return median_of_ratios(self.one_s, self.two_s)

    @property
    def ceiling(self) -> float:
        """The median of what two processes gained over one without a box."""
        return statistics.median(self.ceilings)


@dataclass(frozen=True)
class ClusterTimes:
    """What was measured."""

    plan: ClusterPlan
    without_graphs: Timing
    with_graphs: Timing
    first_rows: Timing
    rows: Timing
    trivial_s: float  # on the cluster, median
    plain_s: float  # on a plain box, median
    reduction: Reduction


def measure_cluster(plan: ClusterPlan) -> ClusterTimes:
    """Run the benchmark.

    Raises:
        RuntimeError: one device and two give different gradients.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    towers = task.tokenised(task.Size(num_pairs=plan.num_pairs, shard_size=plan.shard))
    trivial = ROOT / "deploy" / "models" / "two_layers.py"
    registered = (
        f'[models.{task.MODEL}]\nbuilder = "hf"\nsource = "{task.model_folder()}"\n'
        + TRIVIAL.format(trivial)
    )
    with ExitStack() as stack:
        clients = []
        for device, arguments in (
            ("cpu,cpu", ("--cluster", "local")),
            ("cpu", ()),
        ):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gradbox-bench-"))
            url, token = stack.enter_context(
                running_box(Path(folder), registered=registered, device=device, arguments=arguments)
            )
            clients.append(stack.enter_context(GradClient(url=url, token=token)))
        on_cluster, plain = clients
        job, half = task.job(towers), _half(graph_bytes(towers))
        gradients, graphs_kept, projected = _ceilings(plan)
        trivial_s, plain_s = _trivial(on_cluster), _trivial(plain)
        without = _timed(on_cluster, replace(job, retain=0), plan.rounds, gradients)
        graphs = _timed(on_cluster, replace(job, retain=half), plan.rounds, graphs_kept)
        of_rows = [
            _rows(towers, plan.num_samples, _pooled(number)) for number in range(2 * plan.rounds)
        ]
        first_rows = _joined(
            [
                _timed(on_cluster, two, 1, projected, on_one=one)
                for one, two in zip(of_rows[::2], of_rows[1::2], strict=True)
            ]
        )
        rows = _timed(on_cluster, of_rows[-1], plan.rounds, projected)
    return ClusterTimes(
        plan,
        without_graphs=without,
        with_graphs=graphs,
        first_rows=first_rows,
        rows=rows,
        trivial_s=trivial_s,
        plain_s=plain_s,
        reduction=measure_reduction(),
    )


def cluster_section(found: ClusterTimes) -> str:
    """Describe it."""
    plan, cold, warm, rows = found.plan, found.without_graphs, found.with_graphs, found.rows
    moved = cold.bytes_moved
    travelled = sum(size for kind, size in moved.items() if kind != "inputs")
    least = moved["outputs"] + moved["cotangents"] + cold.result_bytes
    projected = f"rows of {plan.num_samples} samples, projected"
    added_s = found.trivial_s - found.plain_s
    lines = [
        [
            name,
            f"{statistics.median(timing.one_s):.1f}",
            f"{statistics.median(timing.two_s):.1f}",
            f"{timing.speed_up:.2f}",
            f"{timing.ceiling:.2f}",
            f"{timing.retained[0]} and {timing.retained[1]}",
        ]
        for name, timing in (
            ("no graphs kept", cold),
            ("room for half on one", warm),
            (f"{projected}, the first time", found.first_rows),
            (projected, rows),
        )
    ]
    bars = [
        (cold.speed_up >= SPEED_UP, f"two devices are {SPEED_UP} × one"),
        (
            cold.speed_up >= OF_CEILING * cold.ceiling,
            f"they reach {OF_CEILING} of what two processes without a box do",
        ),
        (
            warm.speed_up >= SPEED_UP_WITH_GRAPHS,
            f"with room for all graphs on two they are {SPEED_UP_WITH_GRAPHS} × one",
        ),
        (
            found.first_rows.speed_up >= FIRST_ROWS,
            f"projected rows are {FIRST_ROWS} × one, the first time",
        ),
        (rows.speed_up >= SPEED_UP, f"projected rows are {SPEED_UP} × one"),
        (added_s <= OVERHEAD_S, "an actor adds at most 10 ms to a job"),
        (travelled <= MOVED * least, f"bytes moved are at most {MOVED} × the least"),
        (
            found.reduction.of_copy >= OF_COPY,
            f"sums are reduced at {OF_COPY} of the speed of a copy in memory",
        ),
    ]
    return section(
        "Cluster",
        f"InfoNCE over {plan.num_pairs} pairs through all-MiniLM-L6-v2 in train mode, shard "
        f"{plan.shard}, on one and two CPU actors of one thread each; {plan.rounds} rounds. "
        f"Load of the machine at the end: {os.getloadavg()[0]:.1f}.",
        table(["", "one device, s", "two devices, s", "speed-up", "ceiling", "graphs kept"], lines),
        "The ceiling is what two processes of one thread gain over one on this machine, without a"
        f" box, on one {CEILING_PART}th of the shards; rows with their plans made. The median of"
        " the rounds, each of which measures it behind the two jobs.",
        f"A trivial job takes {found.trivial_s * 1e3:.1f} ms on the cluster, "
        f"{found.plain_s * 1e3:.1f} ms on a plain box. Moved: "
        + ", ".join(f"{kind} {size / MIB:.2f} MiB" for kind, size in moved.items())
        + f"; beside the inputs {travelled / MIB:.2f} MiB, {travelled / least:.2f} × the least "
        "(Z, dL/dZ, and one sum). "
        "A sum of 400 MB is added to that of another actor at "
        f"{found.reduction.speed / 1e9:.2f} GB/s, {found.reduction.of_copy:.2f} of a copy's "
        "speed in memory.",
        verdicts(bars),
    )


def _half(graphs: Sequence[float]) -> int:
    """Return the budget of a device that holds half of the graphs, and room for the next one."""
    return int(sum(graphs) / 2 + max(graphs))


def _ceilings(plan: ClusterPlan) -> tuple[Ceiling, Ceiling, Ceiling]:
    """Return what measures it: of a set gradient, of one with graphs kept, and of rows."""
    pairs = plan.num_pairs // CEILING_PART
    whole, half = (["--pairs", str(number)] for number in (pairs, pairs // 2))
    towers = task.tokenised(task.Size(num_pairs=pairs, shard_size=plan.shard))
    some, every = (["--retain", str(size)] for size in (_half(graph_bytes(towers)), ALL))
    gradient, rows = ((step, "--shard", str(plan.shard)) for step in ("gradient", "rows"))
    return (
        partial(ceiling, *gradient, one=whole, two=half),
        partial(ceiling, *gradient, one=whole + some, two=half + every),
        partial(ceiling, *rows, one=whole, two=half),
    )


def _pooled(number: int) -> Callable[..., torch.Tensor]:
    """Return a readout whose numbers are those of all others, and whose graph is no other's."""

    def pooled(output: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        z = task.mean_pooling(output, inputs)
        for _ in range(number):
            z = z * 1.0
        return z

    return pooled


def _joined(timings: Sequence[Timing]) -> Timing:
    one_s, two_s, ceilings = (
        [seconds for timing in timings for seconds in getattr(timing, name)]
        for name in ("one_s", "two_s", "ceilings")
    )
    return replace(timings[0], one_s=one_s, two_s=two_s, ceilings=ceilings)


def _rows(
    towers: Mapping[str, Sequence[Any]], num_samples: int, readout: Callable[..., torch.Tensor]
) -> PerSampleGradient:
    """Return the projection of so many samples' rows; a text may come more than once."""
    shards = cycle(shard for tower in towers.values() for shard in tower)
    taken, num_left = [], num_samples
    while num_left > 0:
        taken.append(next(shards))
        num_left -= len(next(iter(taken[-1].values())))
    return PerSampleGradient(
        model=task.MODEL,
        inputs=taken,
        loss=lambda z: z.square().sum(1),
        output=task.OUTPUT,
        readout=readout,
        reduce="projection",
        dim=PROJECTED_TO,
    )


def _answer(result: GradResult) -> dict[str, torch.Tensor]:
    if result.manifest.reduce == "projection":
        return {"projection": result.projection()}
    return dict(result.grads)


def _timed(
    client: GradClient,
    job: Gradient | PerSampleGradient,
    rounds: int,
    bare: Ceiling,
    *,
    on_one: Gradient | PerSampleGradient | None = None,
) -> Timing:
    """Time a job on one device and on two; `on_one` is another job for one device.

    Args:
        bare: measures the ceiling, once in every round.
    """
    jobs = {1: on_one or job, 2: job}
    seconds: dict[int, list[float]] = {devices: [] for devices in DEVICES}
    results: dict[int, GradResult] = {}
    ceilings = []
    for _ in range(rounds):
        for devices in DEVICES:
            begin = time.perf_counter()
            results[devices] = client.submit(replace(jobs[devices], devices=devices)).result(
                progress=False
            )
            seconds[devices].append(time.perf_counter() - begin)
        ceilings.append(bare())
    one, two = (results[devices] for devices in DEVICES)
    apart = relative_difference(_answer(two), _answer(one))
    if apart > SAME:
        raise RuntimeError(f"two devices give results that differ from one's by {apart:.1e}")
    retained = (one.manifest.shards_retained or 0, two.manifest.shards_retained or 0)
    result_bytes = sum(tensor.nbytes for tensor in _answer(two).values())
    moved = two.manifest.bytes_moved or {}
    return Timing(seconds[1], seconds[2], retained, moved, result_bytes, ceilings)


def _trivial(client: GradClient) -> float:
    shards: Sequence[torch.Tensor] = [torch.randn(4, 8)]
    job = Gradient(model="two_layers", inputs=shards, loss=lambda z: z.square().mean())
    seconds = []
    for _ in range(NUM_TRIVIAL):
        begin = time.perf_counter()
        client.submit(job).result(progress=False)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[5:])
