"""Training on the box, against the same loop on a local model.

    time      all-MiniLM-L6-v2 in train mode on pairs of sentences, AdamW, a loss over all pairs:
              all of it, its last block, an adapter; a step of a run, and of a plain loop with its
              own optimizer over the same shards, take turns
    bytes     requests and answers of such a step, less its inputs
    a small   a model of 50 parameters: a step, less that of a local model
    disk      what the states of a run take after 30 steps of all of MiniLM, and what all else does
    adapters  eight runs of other ranks and targets on one base: what a step costs after one of
              another run, and by how much the device process grows

One worker with one thread on the CPU, over loopback; no input comes twice. Wall time is for a quiet
machine; beside it stands the processor time of all processes of the box and of the client, which
other programs disturb less. Medians over rounds, of each round's own ratio.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.box.large_results import anonymous_bytes, device_pid
from benchmarks.box.small_jobs import MODEL, Costs, Meter, metered_box
from benchmarks.box.training_step import local_model, trained
from benchmarks.measure import MAPPED, timed
from benchmarks.page import MIB, section, table, verdicts
from gradbox import GradClient, LoRA, Optimizer, TrainRun
from gradbox_worker.demo import task

Towers = dict[str, task.Shards]
Step = Callable[[Towers], object]

RATE: Final = 1e-5
RANK, ALPHA, TARGETS = 8, 16, ("query", "value")
KINDS: Final[Mapping[str, dict[str, Any]]] = {
    "all": {},
    "the last block": {"wrt": "encoder.layer.5.*"},
    "an adapter": {"adapter": LoRA(RANK, ALPHA, [f"*.{name}" for name in TARGETS])},
}
SMALL_PAIRS: Final = 8
SMALL_ROUNDS: Final = 4  # for each of the others
TINY_STEPS: Final = 100
DISK_STEPS: Final = 30
ADAPTERS: Final = [
    LoRA(rank, 2.0 * rank, targets)
    for rank in (8, 16, 32, 64)
    for targets in (["*.query", "*.value"], ["encoder.layer.*.dense"])
]
BAR, SMALL_BAR, SWITCH_BAR = 1.05, 1.15, 1.05
# Of the Python objects of a structure of MiniLM with its adapters, which are no tensors.
STRUCTURE_BYTES: Final = 1.5 * MIB
WIRE_BAR_BYTES, TINY_BAR_MS, DISK_BAR, MEMORY_BAR = 16_000, 7.0, 2.0, 4.0


@dataclass(frozen=True)
class RunsPlan:
    """What to measure: pairs of a step, of a shard, and rounds."""

    num_pairs: int
    shard: int
    rounds: int


@dataclass(frozen=True)
class Compared:
    """Steps of a run and of a local loop, one of each a round; `input_bytes` are of one step."""

    kind: str
    num_pairs: int
    input_bytes: int
    run: list[Costs]
    local: list[Costs]

    @property
    def ratio(self) -> float:
        pairs = zip(self.run, self.local, strict=True)
        return statistics.median(a.median_ms / b.median_ms for a, b in pairs)

    @property
    def cpu_ratio(self) -> float:
        pairs = zip(self.run, self.local, strict=True)
        return statistics.median(
            sum(a.cpu_ms.values()) / max(b.cpu_ms["client"], 1.0) for a, b in pairs
        )

    @property
    def beyond_inputs_bytes(self) -> float:
        return max(one.num_bytes for one in self.run) - self.input_bytes


@dataclass(frozen=True)
class TrainingRuns:
    """What was measured.

    Attributes:
        disk_bytes: of the states of a run of all of MiniLM, after `DISK_STEPS` steps or more.
        state_bytes: of one of them.
        beside_bytes: what the rest of the data folder grew by in these steps.
        switch: a step after one of another run, to one after one of the same.
        adapter_bytes: of all adapters together.
        grown_bytes: what the device process grew by as they were trained.
    """

    compared: list[Compared]
    tiny_ms: float
    tiny_local_ms: float
    tiny_bytes: float
    disk_bytes: int
    state_bytes: int
    beside_bytes: int
    switch: float
    adapter_bytes: int
    grown_bytes: int


def measure_training_runs(plan: RunsPlan) -> TrainingRuns:
    """Run the benchmark."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    inputs = {
        pairs: task.tokenised(task.Size(num_pairs=pairs, shard_size=min(pairs, plan.shard)))
        for pairs in (plan.num_pairs, SMALL_PAIRS)
    }
    rounds = {plan.num_pairs: plan.rounds, SMALL_PAIRS: SMALL_ROUNDS * plan.rounds}
    compared, disk = [], (0, 0, 0)
    with _box() as (client, meter):
        for kind, chosen in KINDS.items():
            meter.rest()
            before = _disk_bytes(meter.data)
            run, local = _begun(client, chosen), _local_step(chosen)
            for pairs, towers in inputs.items():
                compared.append(_compared(kind, run, local, meter, towers, rounds[pairs]))
            if kind == "all":
                disk = _disk(run, meter, inputs[SMALL_PAIRS], before)
        tiny, tiny_local_ms = _tiny(client, meter)
        switch = _switch(client, inputs[SMALL_PAIRS], rounds=plan.rounds)
    with patch.dict(os.environ, MAPPED), _box() as (client, meter):
        adapter_bytes, grown_bytes = _memory(client, meter, inputs[SMALL_PAIRS])
    return TrainingRuns(
        compared=compared,
        tiny_ms=tiny.median_ms,
        tiny_local_ms=tiny_local_ms,
        tiny_bytes=tiny.num_bytes,
        disk_bytes=disk[0],
        state_bytes=disk[1],
        beside_bytes=disk[2],
        switch=switch,
        adapter_bytes=adapter_bytes,
        grown_bytes=grown_bytes,
    )


def training_runs_section(found: TrainingRuns) -> str:
    """Describe the benchmark."""
    rows = [
        [
            one.kind,
            str(one.num_pairs),
            f"{statistics.median(cost.median_ms for cost in one.run):.0f}",
            f"{statistics.median(cost.median_ms for cost in one.local):.0f}",
            f"{one.ratio:.3f}",
            f"{one.cpu_ratio:.3f}",
            f"{statistics.median(cost.num_requests for cost in one.run):.0f}",
            f"{one.input_bytes / 1e3:.0f}",
            f"{one.beyond_inputs_bytes / 1e3:.1f}",
        ]
        for one in found.compared
    ]
    head = ["trained", "pairs", "run, ms", "local, ms", "ratio", "CPU ratio", "requests"]
    bars = [
        (one.ratio <= bar, f"{one.kind}, {one.num_pairs} pairs: {one.ratio:.3f}, allowed {bar}")
        for one in found.compared
        for bar in [SMALL_BAR if one.num_pairs == SMALL_PAIRS else BAR]
    ]
    wire_bytes = max(one.beyond_inputs_bytes for one in found.compared)
    beyond_ms = found.tiny_ms - found.tiny_local_ms
    states = found.disk_bytes / found.state_bytes
    tensors = found.grown_bytes - len(ADAPTERS) * STRUCTURE_BYTES
    adapters = max(0.0, tensors / found.adapter_bytes)
    bars += [
        (
            wire_bytes <= WIRE_BAR_BYTES,
            f"{wire_bytes / 1e3:.1f} kB a step beyond inputs, allowed {WIRE_BAR_BYTES / 1e3:.0f}",
        ),
        (
            beyond_ms <= TINY_BAR_MS,
            f"a step of a small model takes {beyond_ms:.1f} ms beyond its computation, "
            f"allowed {TINY_BAR_MS:.0f}",
        ),
        (
            states <= DISK_BAR,
            f"{DISK_STEPS} steps of all take {states:.2f} states on disk, allowed {DISK_BAR:.0f}",
        ),
        (
            found.switch <= SWITCH_BAR,
            f"a step after one of another run takes {found.switch:.3f} of one that goes on, "
            f"allowed {SWITCH_BAR}",
        ),
        (
            adapters <= MEMORY_BAR,
            f"{len(ADAPTERS)} adapters take {adapters:.2f} times their bytes beside the base, "
            f"without {STRUCTURE_BYTES / MIB:.1f} MiB for the modules of each, allowed "
            f"{MEMORY_BAR:.0f}",
        ),
    ]
    return section(
        "Training on the box",
        f"all-MiniLM-L6-v2 in train mode, AdamW, one thread; an adapter of rank {RANK} at query "
        f"and value. Load of the machine {os.getloadavg()[0]:.1f}.",
        table([*head, "inputs, kB", "beyond, kB"], rows),
        f"A step of a model of 50 parameters: {found.tiny_ms:.1f} ms, here "
        f"{found.tiny_local_ms:.1f} ms, {found.tiny_bytes / 1e3:.1f} kB on the wire. A state of "
        f"all of MiniLM: {found.state_bytes / MIB:.0f} MiB; the rest of the data folder grew by "
        f"{found.beside_bytes / MIB:.1f} MiB in its steps. {len(ADAPTERS)} adapters of "
        f"{found.adapter_bytes / MIB:.1f} MiB together: the device process grew by "
        f"{found.grown_bytes / MIB:.1f} MiB.",
        verdicts(bars),
    )


@contextmanager
def _box() -> Iterator[tuple[GradClient, Meter]]:
    """Run a box with MiniLM and the small model."""
    with tempfile.TemporaryDirectory(prefix="gradbox-runs-") as name:
        source = Path(name) / "model.py"
        source.write_text(MODEL)
        registered = (
            f'[models.tiny]\nbuilder = "python"\nsource = "{source}:tiny"\n'
            f'[models.{task.MODEL}]\nbuilder = "hf"\n'
            f"source = {json.dumps(str(task.model_folder()))}\n"
        )
        with metered_box(Path(name), registered=registered) as box:
            yield box


def _begun(client: GradClient, chosen: Mapping[str, Any]) -> TrainRun:
    return client.train(task.MODEL, optimizer=Optimizer("adamw", lr=RATE), **chosen)


def _step(run: TrainRun, towers: Towers) -> object:
    return run.step(
        inputs=towers,
        loss=task.info_nce,
        readout=task.mean_pooling,
        output=task.OUTPUT,
        progress=False,
    )


def _local_step(chosen: Mapping[str, Any]) -> Step:
    model = local_model()
    if "adapter" in chosen:
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS))
        inject_adapter_in_model(config, model)
        parameters = [p for p in model.parameters() if p.requires_grad]
    else:
        model.requires_grad_(False)
        parameters = [*trained(model, chosen.get("wrt", "*")).values()]
        for parameter in parameters:
            parameter.requires_grad_()
    optimizer = torch.optim.AdamW(parameters, lr=RATE)

    def step(towers: Towers) -> None:
        optimizer.zero_grad()
        embeddings = {
            name: torch.cat(
                [task.mean_pooling(model(**shard)[task.OUTPUT], shard) for shard in shards]
            )
            for name, shards in towers.items()
        }
        torch.autograd.backward(task.info_nce(**embeddings))
        optimizer.step()

    return step


def _compared(
    kind: str, run: TrainRun, local: Step, meter: Meter, towers: Towers, rounds: int
) -> Compared:
    """Take turns; the first step of each, which brings files and memory into being, is left out."""
    steps: dict[str, Step] = {"run": partial(_step, run), "local": local}
    costs: dict[str, list[Costs]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        given = _shuffled(towers)
        for name in list(steps) if number % 2 else list(steps)[::-1]:
            costs[name].append(meter.measure(partial(steps[name], given), 1))
    shards = [shard for each in towers.values() for shard in each]
    return Compared(
        kind,
        num_pairs=sum(len(shard["input_ids"]) for shard in towers["queries"]),
        input_bytes=sum(tensor.nbytes for shard in shards for tensor in shard.values()),
        run=costs["run"][1:],
        local=costs["local"][1:],
    )


def _shuffled(towers: Towers) -> Towers:
    """Return the pairs of each shard in another order."""
    orders = [torch.randperm(len(shard["input_ids"])) for shard in towers["queries"]]
    return {
        name: [
            {key: x[order] for key, x in shard.items()}
            for shard, order in zip(shards, orders, strict=True)
        ]
        for name, shards in towers.items()
    }


def _disk(run: TrainRun, meter: Meter, towers: Towers, before: int) -> tuple[int, int, int]:
    """Return the bytes of a run's states, of one of them, and of what came beside them."""
    while run.num_steps < DISK_STEPS:
        _step(run, _shuffled(towers))
    meter.rest()  # a due state is written between jobs
    folder = meter.data / "runs" / run.id
    states = [path.stat().st_size for path in folder.glob("*.safetensors")]
    of_run = _disk_bytes(folder)
    return of_run, max(states), _disk_bytes(meter.data) - before - of_run


def _disk_bytes(data: Path) -> int:
    return sum(path.stat().st_size for path in data.rglob("*") if path.is_file())


def _tiny(client: GradClient, meter: Meter) -> tuple[Costs, float]:
    """Return the costs of a small model's step, and the milliseconds of it here."""
    run = client.train("tiny", optimizer=Optimizer("adam", lr=0.01))
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def remote() -> None:
        run.step(inputs=[torch.randn(8, 5)], loss=_mean_square, progress=False)

    def local() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(_mean_square(model(torch.randn(8, 5))))
        optimizer.step()

    for _ in range(10):
        remote()
        local()
    meter.rest()
    local_ms = meter.measure(local, TINY_STEPS).median_ms
    return meter.measure(remote, TINY_STEPS), local_ms


def _mean_square(z: Tensor) -> Tensor:
    return z.square().mean()


def _switch(client: GradClient, towers: Towers, *, rounds: int) -> float:
    """Return what a step after one of another run takes, to one after one of the same run."""
    runs = [_begun(client, {"adapter": adapter}) for adapter in ADAPTERS]
    ratios: list[float] = []
    for number in range(rounds + 1):
        for run in runs:
            switched, stayed = (
                timed(partial(_step, run, _shuffled(towers))).wall for _ in range(2)
            )
            if number:
                ratios.append(switched / stayed)
    return statistics.median(ratios)


def _memory(client: GradClient, meter: Meter, towers: Towers) -> tuple[int, int]:
    """Return the bytes of all adapters, and by how many the device process grew with them."""
    _step(_begun(client, {"adapter": LoRA(1, 1.0, ["*.query"])}), towers)
    meter.rest()
    pid = device_pid(meter.data)
    before = anonymous_bytes(pid)
    runs = [_begun(client, {"adapter": adapter}) for adapter in ADAPTERS]
    for run in runs:
        _step(run, towers)
    meter.rest()
    grown = anonymous_bytes(pid) - before
    return sum(tensor.nbytes for run in runs for tensor in run.weights().values()), grown
