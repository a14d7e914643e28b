"""Per-sample gradients and Jacobians beside vmap, Opacus and BackPACK, in one run, with the floor.

The base is one summed forward and backward of the same batch. The floor of a dense result is the
base, and the bytes of the result written once at the device's measured speed. All in eval mode; a
peer that is not installed, cannot do the model, or runs out of memory says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from benchmarks.cuda import models
from benchmarks.cuda.clock import Ceilings, Clock
from benchmarks.cuda.sizes import Sizes
from benchmarks.page import mebibytes, table
from benchmarks.per_sample.peers import Arrays, peers
from benchmarks.per_sample.workloads import WORKLOADS, Workload, call, summed_gradient

OURS: dict[str, dict[str, Any]] = {
    "gradbox, dense": {},
    "gradbox, factored": {"form": "factored"},
    "gradbox, norms": {"reduce": "norm"},
}
LEFT_OUT = frozenset({"loop"})  # as many backward passes as samples and outputs


def measure(clock: Clock, ceilings: Ceilings, sizes: Sizes) -> str:
    """Return the section."""
    lines = ["## Rows for every sample", ""]
    for build in _workloads(sizes):
        lines += [*_measured(_on(build(), clock.device), clock, ceilings, sizes), ""]
        if clock.on_cuda:
            torch.cuda.empty_cache()
    return "\n".join(lines)


def _workloads(sizes: Sizes) -> Iterator[Callable[[], Workload]]:
    for name, build in WORKLOADS.items():
        yield partial(_text, sizes) if name == "W4" else partial(_cut, build, sizes, name)
    yield partial(_gpt2, sizes)


def _cut(build: Callable[[], Workload], sizes: Sizes, name: str) -> Workload:
    work = build()
    samples = sizes.samples.get(name)
    return replace(work, shard={n: x[:samples] for n, x in work.shard.items()})


def _text(sizes: Sizes) -> Workload:
    """W4 with random weights: 16 texts of 32 tokens through MiniLM's architecture."""
    model = models.TextEncoder(sizes.text_layers).eval()
    shard = models.texts(1, min(16, sizes.text_shard), sizes, torch.device("cpu"))[0]
    return Workload("W4, random weights", model, shard, lambda z: z.square().sum(1))


def _gpt2(sizes: Sizes) -> Workload:
    """GPT-2 small (124 M parameters), 8 texts of 64 tokens, its last hidden states."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    small: dict[str, Any] = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 500}
    config = GPT2Config(use_cache=False, **(small if sizes.samples else {}))
    samples, tokens = (2, 8) if sizes.samples else (8, 64)
    shard = {"input_ids": torch.randint(config.vocab_size, (samples, tokens))}
    return Workload(
        "GPT-2 small",
        GPT2Model(config).eval(),
        shard,
        lambda z: z.mean(1).square().sum(1),
        output="last_hidden_state",
    )


def _on(work: Workload, device: torch.device) -> Workload:
    shard = {name: x.to(device) for name, x in work.shard.items()}
    return replace(work, model=work.model.to(device), shard=shard)


def _built_once(
    build: Callable[[Workload], Callable[[], Arrays]], work: Workload
) -> Callable[[], object]:
    """Return a call that builds what it runs when it is first made, and may fail then."""
    built = cache(lambda: build(work))
    return lambda: built()()


def _measured(work: Workload, clock: Clock, ceilings: Ceilings, sizes: Sizes) -> Iterator[str]:
    runs: dict[str, Callable[[], object]] = {"base": partial(summed_gradient, work)}
    absent: dict[str, str] = {}
    ours: dict[str, Callable[[], object]] = {
        name: partial(call, work, **how) for name, how in OURS.items()
    }
    others = {n: _built_once(b, work) for n, b in peers().items() if n not in LEFT_OUT}
    for name, run in {**ours, **others}.items():
        try:
            run()
        except Exception as error:  # noqa: BLE001 - whatever another library raises
            lines = str(error).splitlines() or [""]
            absent[name] = f"{type(error).__name__}: {lines[0][:90]}"
        else:
            runs[name] = run
    times = clock.interleaved(runs, rounds=sizes.rounds)
    samples = len(next(iter(work.shard.values())))
    result_bytes = samples * work.outputs * sum(p.nbytes for p in work.model.parameters())
    base_s = times["base"].median
    floor = (base_s + result_bytes / (ceilings.copied_bytes_per_s / 2)) / base_s
    yield f"### {work.name}: {samples} samples, {work.outputs} output(s)"
    yield ""
    yield (
        f"Base {base_s * 1e3:.2f} ms; a dense result of {mebibytes(result_bytes)} MiB has its "
        f"floor at {floor:.2f}."
    )
    yield ""
    rows = []
    for name in runs:
        peak = clock.peak_bytes(runs[name])
        held = "n/a" if peak is None else mebibytes(peak)
        ms = f"{times[name].median * 1e3:.2f}"
        rows.append([name, ms, str(times[name].ratio(times["base"])), held])
    rows += [[f"{name}: {why}", "", "", ""] for name, why in absent.items()]
    yield from table(["", "ms", "to the base", "peak MiB"], rows)
