"""What a client without a box takes beyond the engine, and attribution beside `torch.func.vmap`.

    a small call    a `Gradient` of three shards through 50 parameters, by `GradClient.local`: how
                    long the call is, how much of it the engine's, and how much tracing the loss
    attribution     the products of 1,800 samples' gradients with 200 others', float64, through a
                    classifier of 2,410 parameters: in shards of 50 as the examples cut them, in one
                    shard each, and by vmap of a gradient

Processor time of this process, one thread: the least of many runs, for a busy machine adds to each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from benchmarks.measure import interleaved, timed
from benchmarks.page import section, table, verdicts
from gradbox import GradClient, Gradient, PerSampleGradient
from gradbox_worker.computations import gradient as computation

CALLS: Final = 300
ROUNDS: Final = 7
NUM_TRAIN, NUM_TEST = 1800, 200
MOST_BEYOND_MS: Final = 1.5
MOST_ATTRIBUTION_S: Final = 0.12


@dataclass(frozen=True)
class Local:
    """What was measured; `load` is the machine's, of a minute."""

    call_ms: float
    beyond_ms: float  # of the call, beyond the engine
    tracing_ms: float  # of that
    attribution_s: dict[str, float]
    difference: float  # of the products, to vmap's
    load: float


def measure_local() -> Local:
    """Run the benchmark."""
    torch.set_num_threads(1)
    call_ms, beyond_ms, tracing_ms = _small_call()
    attribution_s, difference = _attribution()
    return Local(call_ms, beyond_ms, tracing_ms, attribution_s, difference, os.getloadavg()[0])


def local_section(found: Local) -> str:
    """Describe the benchmark."""
    seconds = found.attribution_s
    bars = [
        (found.beyond_ms <= MOST_BEYOND_MS, f"{MOST_BEYOND_MS} ms beyond the engine at most"),
        (
            seconds["shards of 50"] <= MOST_ATTRIBUTION_S,
            f"attribution within {MOST_ATTRIBUTION_S} s",
        ),
    ]
    return section(
        "Without a box",
        "`GradClient.local` on one thread of a CPU; the least processor time of many runs; load of "
        f"the machine {found.load:.1f}.",
        table(
            ["a small call", "ms"],
            [
                ["whole", f"{found.call_ms:.2f}"],
                ["beyond the engine", f"{found.beyond_ms:.2f}"],
                ["of that, tracing the loss", f"{found.tracing_ms:.2f}"],
            ],
        ),
        table(
            [f"products of {NUM_TRAIN} × {NUM_TEST} gradients", "s"],
            [[name, f"{taken:.3f}"] for name, taken in seconds.items()],
        ),
        f"The products differ from vmap's by {found.difference:.0e} of the largest.",
        verdicts(bars),
    )


def _small_call() -> tuple[float, float, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    shards = [torch.randn(4, 5) for _ in range(3)]
    client = GradClient.local({"tiny": model})

    def job() -> Gradient:
        return Gradient(model="tiny", inputs=shards, loss=lambda z: z.square().mean())

    calls, beyond, tracing = [], [], []
    with _engine_timed() as spent:
        for _ in range(CALLS):
            whole = timed(lambda: client.run(job())).cpu
            calls.append(whole)
            beyond.append(whole - spent[-1])
            tracing.append(timed(lambda: job().prepare()).cpu)
    return 1e3 * min(calls), 1e3 * min(beyond), 1e3 * min(tracing)


@contextmanager
def _engine_timed() -> Iterator[list[float]]:
    """Give what every gradient took in the engine."""
    spent: list[float] = []
    engine: Callable[..., Any] = computation.gradient

    def measured(*args: Any, **kwargs: Any) -> Any:
        answers: list[Any] = []
        spent.append(timed(lambda: answers.append(engine(*args, **kwargs))).cpu)
        return answers[0]

    computation.gradient = measured
    try:
        yield spent
    finally:
        computation.gradient = engine


def _attribution() -> tuple[dict[str, float], float]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    pixels = torch.rand(NUM_TRAIN + NUM_TEST, 64, generator=generator, dtype=torch.float64)
    labels = torch.randint(10, (NUM_TRAIN + NUM_TEST,), generator=generator)
    x, test_x = pixels[:NUM_TRAIN], pixels[NUM_TRAIN:]
    of, test_of = labels[:NUM_TRAIN], labels[NUM_TRAIN:]
    client = GradClient.local({"digits": model})

    def here(size: int) -> Tensor:
        job = PerSampleGradient(
            model="digits",
            inputs={"test": list(test_x.split(size)), "train": list(x.split(size))},
            loss=lambda z, labels: F.cross_entropy(z, labels, reduction="none"),
            loss_inputs={"labels": {"test": test_of, "train": of}},
            reduce="gram",
            against="train",
        )
        products: Tensor = client.run(job).gram()
        return products

    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def one(given: dict[str, Tensor], pixel: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, given, (pixel[None],)), label[None])

    def rows(pixels: Tensor, labels: Tensor) -> Tensor:
        found = vmap(grad(one), in_dims=(None, 0, 0))(parameters, pixels, labels)
        return torch.cat([row.flatten(1) for row in found.values()], 1)

    def by_vmap() -> Tensor:
        return rows(test_x, test_of) @ rows(x, of).T

    runs: dict[str, Callable[[], object]] = {
        "shards of 50": lambda: here(50),
        "one shard each": lambda: here(NUM_TRAIN),
        "vmap": by_vmap,
    }
    taken = {
        name: min(run.cpu for run in all_runs)
        for name, all_runs in interleaved(runs, rounds=ROUNDS).items()
    }
    exact = by_vmap()
    return taken, float((here(50) - exact).abs().max() / exact.abs().max())
