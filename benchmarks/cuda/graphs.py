"""Whether a shard's call and its backward pass would gain by CUDA graphs or by torch.compile.

Measured on the call alone, at shards of one shape, in train mode with dropout; z and gradients are
compared with those of the plain call under the same random stream. The bar: a tenth of the time,
with results as near as float32 rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cuda import models
from benchmarks.cuda.clock import Clock
from benchmarks.cuda.models import Shard
from benchmarks.cuda.sizes import Sizes
from benchmarks.measure import relative_difference
from benchmarks.page import section, table
from gradbox_engine import shard_stream

NEAR = 1e-5
GAIN = 0.9

Step = Callable[[], dict[str, Tensor]]


def measure(clock: Clock, sizes: Sizes) -> str:
    """Return the section."""
    rows: list[list[str]] = []
    for shard_size in sizes.small_shards:
        shard = models.texts(1, shard_size, sizes, clock.device)[0]
        rows += _measured(clock, sizes, shard, shard_size)
    head = ["MiniLM, shard", "how", "ms", "to the plain call", "difference", "verdict"]
    about = "One forward and one backward of a shard, the same shapes every time."
    return section("CUDA graphs and torch.compile", about, table(head, rows))


def _measured(clock: Clock, sizes: Sizes, shard: Shard, size: int) -> list[list[str]]:
    plain = partial(_step, _model(clock, sizes), shard)
    runs: dict[str, Step] = {"plain": plain}
    absent: dict[str, str] = {}
    ways = {"CUDA graphs": _graphed, "torch.compile": _compiled}
    for name, way in ways.items():
        if name == "CUDA graphs" and not clock.on_cuda:
            absent[name] = "needs a CUDA device"
            continue
        try:
            runs[name] = way(_model(clock, sizes), shard)
            runs[name]()
        except Exception as error:  # noqa: BLE001 - compilers and captures raise of all kinds
            runs.pop(name, None)
            absent[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"
    times = clock.interleaved(runs, rounds=sizes.rounds)
    expected = _under_stream(plain)
    rows = []
    for name, run in runs.items():
        ratio = times[name].ratio(times["plain"])
        apart = relative_difference(_under_stream(run), expected)
        wins = ratio.median <= GAIN and apart <= NEAR
        said = "" if name == "plain" else "wins" if wins else "no"
        ms = f"{times[name].median * 1e3:.2f}"
        rows.append([str(size), name, ms, str(ratio), f"{apart:.1e}", said])
    rows += [[str(size), name, "", "", "", why] for name, why in absent.items()]
    return rows


def _model(clock: Clock, sizes: Sizes) -> nn.Module:
    return models.TextEncoder(sizes.text_layers).to(clock.device).train()


def _step(
    model: nn.Module, shard: Shard, call: Callable[..., Any] | None = None
) -> dict[str, Tensor]:
    z = (model if call is None else call)(shard["input_ids"])
    z.square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _compiled(model: nn.Module, shard: Shard) -> Step:
    # On a CPU without its code generator, which takes minutes: only to try the line.
    backend = "inductor" if shard["input_ids"].is_cuda else "aot_eager"
    return partial(_step, model, shard, torch.compile(model, backend=backend))


def _graphed(model: nn.Module, shard: Shard) -> Step:
    graphed = torch.cuda.make_graphed_callables(model, (shard["input_ids"],))
    # The captured backward writes into tensors of its own: what is taken is copied.
    return lambda: {n: g.clone() for n, g in _step(model, shard, graphed).items()}


def _under_stream(run: Step) -> dict[str, Tensor]:
    with shard_stream(0, 0, 0):
        return {name: gradient.clone() for name, gradient in run().items()}
