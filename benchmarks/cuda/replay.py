"""The engine over the kernels it runs, public methods beside it, and time against kept graphs.

*Kernels alone* is a loop without bookkeeping: every shard forward with its graph dropped but for
the last, the loss, then every other shard forward and backward. *GradCache's passes* follow the
paper (Gao et al. 2021, section 3): a first pass under no_grad, then all shards again. *torch's
checkpoint* wraps the call on a shard, under one graph of all.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.cuda import models
from benchmarks.cuda.clock import Clock, Times
from benchmarks.cuda.models import Shard, info_nce
from benchmarks.cuda.sizes import Sizes
from benchmarks.measure import relative_difference
from benchmarks.page import mebibytes, table, verdict
from gradbox_engine import Group, Objective, SetGradient, set_gradient, shard_stream

ALLOWANCE = 1.03
EXACT = 1e-3  # float32 with atomics, against one graph of all shards
SEED = 0
KEPT_SHARES = (0.0, 0.25, 0.5, 1.0)
EVERYTHING = 10**13

Run = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class Task:
    """A model and its shards."""

    name: str
    model: nn.Module
    shards: Sequence[Shard]

    def gradbox(self, *, retain: int = 0) -> SetGradient:
        """Return the gradient by the engine."""
        return set_gradient(
            self.model, [Group("z", self.shards)], Objective(info_nce), seed=SEED, mode="train",
            retain=retain,
        )  # fmt: skip

    def grads(self) -> dict[str, Tensor]:
        """Take the gradients off the model."""
        found = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return found


def tasks(sizes: Sizes, device: torch.device) -> Iterator[Task]:
    """Yield the tasks, one at a time in memory."""
    text = models.TextEncoder(sizes.text_layers).to(device).train()
    shards = models.texts(sizes.num_shards, sizes.text_shard, sizes, device)
    yield Task(f"MiniLM, shard {sizes.text_shard}, {sizes.num_tokens} tokens", text, shards)
    del text
    image = models.ImageEncoder(sizes.image_blocks).to(device).train()
    yield Task(
        f"ResNet-50, shard {sizes.image_shard}, {sizes.image_side} × {sizes.image_side}",
        image,
        models.images(sizes.num_shards, sizes, device),
    )


def kernels_alone(task: Task) -> dict[str, Tensor]:
    """Compute the gradient with the engine's kernels and nothing else."""
    *others, last_shard = task.shards
    outputs = [task.model(**shard).detach() for shard in others]
    last = task.model(**last_shard)
    z = torch.cat([*outputs, last.detach()]).requires_grad_()
    info_nce(z).backward()
    assert z.grad is not None
    *cotangents, last_cotangent = z.grad.split([len(part) for part in (*outputs, last)])
    last.backward(last_cotangent)
    for shard, cotangent in zip(others, cotangents, strict=True):
        task.model(**shard).backward(cotangent)
    return task.grads()


def grad_cache_passes(task: Task) -> dict[str, Tensor]:
    """Compute it as GradCache does, random states of the device put back before the second pass."""
    states, outputs = [], []
    with torch.no_grad():
        for shard in task.shards:
            states.append(_random_state(task))
            outputs.append(task.model(**shard))
    z = torch.cat(outputs).requires_grad_()
    info_nce(z).backward()
    assert z.grad is not None
    for shard, state, cotangent in zip(
        task.shards, states, z.grad.split([len(part) for part in outputs]), strict=True
    ):
        _set_random_state(task, state)
        task.model(**shard).backward(cotangent)
    return task.grads()


def checkpointed(task: Task) -> dict[str, Tensor]:
    """Compute it by one graph in which the call on a shard is a checkpoint."""

    def call(*values: Tensor, names: tuple[str, ...]) -> Tensor:
        z: Tensor = task.model(**dict(zip(names, values, strict=True)))
        return z

    zs = [
        checkpoint(partial(call, names=tuple(shard)), *shard.values(), use_reentrant=False)
        for shard in task.shards
    ]
    info_nce(torch.cat(zs)).backward()
    return task.grads()


def all_graphs(task: Task) -> dict[str, Tensor]:
    """Compute it by one graph of all shards, under gradbox's random streams."""
    zs = []
    for index, shard in enumerate(task.shards):
        with shard_stream(SEED, 0, index):
            zs.append(task.model(**shard))
    info_nce(torch.cat(zs)).backward()
    return task.grads()


def sentence_transformers_loss(task: Task) -> Run:
    """Return sentence-transformers' cached loss on the same encoder.

    Raises:
        ImportError: it is not installed.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

    class Sentences(nn.Module):
        """A module of a SentenceTransformer: features in, an embedding by name out."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = task.model

        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            return {**features, "sentence_embedding": self.encoder(features["input_ids"])}

    shard = len(task.shards[0]["input_ids"])
    rows = torch.cat([shard["input_ids"] for shard in task.shards])
    half = len(rows) // 2
    features: Any = [{"input_ids": rows[:half]}, {"input_ids": rows[half : 2 * half]}]
    sentences = SentenceTransformer(
        modules=[Sentences()], device=str(next(task.model.parameters()).device)
    ).train()
    loss = CachedMultipleNegativesRankingLoss(
        sentences, scale=1 / models.TEMPERATURE, mini_batch_size=shard
    )

    def run() -> dict[str, Tensor]:
        loss(features, None).backward()
        return task.grads()

    return run


def measure(clock: Clock, sizes: Sizes) -> str:
    """Return the section."""
    lines = ["## The engine over its kernels, and peers at equal memory", ""]
    bars: list[str] = []
    for task in tasks(sizes, clock.device):
        lines += [*_measured(task, clock, sizes, bars), ""]
    return "\n".join([*lines, *(f"- {bar}" for bar in bars)])


def _measured(task: Task, clock: Clock, sizes: Sizes, bars: list[str]) -> Iterator[str]:
    peers, absent = _peers(task)
    runs: dict[str, Callable[[], object]] = {
        "kernels alone": partial(kernels_alone, task),
        "gradbox, nothing kept": task.gradbox,
        **peers,
    }
    times = clock.interleaved(runs, rounds=sizes.rounds)
    peaks = {name: clock.peak_bytes(run) for name, run in runs.items()}
    least = peaks["gradbox, nothing kept"]
    base = times["kernels alone"]
    rows = []
    for name in runs:
        equal = ""
        if name in peers and least is not None:
            equal = _at_equal_memory(task, clock, peaks[name] or 0, least, base, sizes)
        ratio = times[name].ratio(base)
        cells = [name, f"{times[name].median * 1e3:.1f}", str(ratio), mebibytes(peaks[name])]
        rows.append([*(cells if least is not None else [*cells[:3], "n/a"]), equal])
    rows += [[f"{name}: {why}", "", "", "", ""] for name, why in absent.items()]
    yield f"### {task.name}, {len(task.shards)} shards"
    yield ""
    yield from table(["", "ms", "to kernels alone", "peak MiB", "gradbox at that memory"], rows)
    yield ""
    yield from _retention(task, clock, sizes)
    exact = all_graphs(task)
    found = task.gradbox()
    error = relative_difference(found.grads, exact)
    ours = times["gradbox, nothing kept"].ratio(base)
    bars.append(
        verdict(
            ours.median <= ALLOWANCE, f"{task.name}: {ours} of its kernels, at most {ALLOWANCE}"
        )
    )
    bars.append(
        verdict(
            error <= EXACT,
            f"{task.name}: gradient off by {error:.1e} from one graph of all shards, replays by "
            f"{found.replay_difference:.1e}",
        )
    )


def _peers(task: Task) -> tuple[dict[str, Run], dict[str, str]]:
    peers: dict[str, Run] = {
        "GradCache's passes": partial(grad_cache_passes, task),
        "torch's checkpoint": partial(checkpointed, task),
    }
    absent = {}
    name = "sentence-transformers' cached loss"
    if "input_ids" not in task.shards[0]:
        absent[name] = "of texts alone"
    elif importlib.util.find_spec("sentence_transformers") is None:
        absent[name] = "not installed"
    else:
        try:
            run = sentence_transformers_loss(task)
            run()
            peers[name] = run
        except (AttributeError, TypeError, ValueError, ImportError) as error:
            absent[name] = f"{type(error).__name__}: {str(error)[:100]}"
    return peers, absent


def _at_equal_memory(
    task: Task, clock: Clock, peak: int, least: int, base: Times, sizes: Sizes
) -> str:
    """Return the engine's time with as many graphs kept as a peer's peak has room for."""
    if peak < least:
        return f"needs {mebibytes(least)} MiB"
    run = partial(task.gradbox, retain=peak - least)
    taken = clock.interleaved({"": run}, rounds=sizes.rounds)[""]
    return f"{taken.median / base.median:.3f}"


def _retention(task: Task, clock: Clock, sizes: Sizes) -> Iterator[str]:
    """Measure time and peak over how much may be kept; the line between its two ends."""
    whole = clock.peak_bytes(partial(task.gradbox, retain=EVERYTHING)) or 0
    least = clock.peak_bytes(task.gradbox) or 0
    budgets = [round(share * (whole - least)) for share in KEPT_SHARES[:-1]] + [EVERYTHING]
    runs = {str(retain): partial(task.gradbox, retain=retain) for retain in dict.fromkeys(budgets)}
    times = clock.interleaved(
        {"one graph of all": partial(all_graphs, task), **runs}, rounds=sizes.rounds
    )
    rows = []
    for retain in dict.fromkeys(budgets):
        result = task.gradbox(retain=retain)
        ratio = times[str(retain)].ratio(times["one graph of all"])
        peak = clock.peak_bytes(runs[str(retain)])
        held = "n/a" if peak is None else mebibytes(peak)
        rows.append([f"{result.retained} of {len(task.shards)} kept", str(ratio), held])
    yield from table(["retention", "to one graph of all shards", "peak MiB"], rows)


def _random_state(task: Task) -> Tensor:
    on_cuda = next(task.model.parameters()).is_cuda
    return torch.cuda.get_rng_state() if on_cuda else torch.get_rng_state()


def _set_random_state(task: Task, state: Tensor) -> None:
    if next(task.model.parameters()).is_cuda:
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)
