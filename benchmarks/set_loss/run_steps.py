"""A run's step on its device against a plain loop: forward, backward, the same optimizer's update.

    HF_HUB_OFFLINE=1 python -m benchmarks.set_loss.run_steps --pairs 64 --rounds 15

MiniLM in train mode on both towers, 32 tokens a text, AdamW in torch's fused form on either side.
The box's part runs in this process, from the spec to the result file, without queue and HTTP.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save
from torch import nn

from benchmarks.measure import interleaved, median_ratio, reuse_memory
from benchmarks.set_loss.pairs import Batch, text_pairs
from gradbox.protocol import (
    GraphLoss,
    InputGroup,
    LoRASpec,
    OptimizerSpec,
    RunSpec,
    ShardRef,
    StepSpec,
    TracedFunction,
    spec_digest,
    step_seed,
)
from gradbox.tracing.trace import trace
from gradbox_engine import shard_stream
from gradbox_service.store import BlobStore
from gradbox_worker.computations.execution import Execution
from gradbox_worker.computations.kept_graphs import KeptGraphs
from gradbox_worker.demo.task import info_nce, mean_pooling, model_folder
from gradbox_worker.models import read_models_file
from gradbox_worker.models.registry import Registry
from gradbox_worker.runs import KeptStep, KnownRun, RunStates, StateFiles
from gradbox_worker.runs.adapters import adapted
from gradbox_worker.work import Finished, Work

CPU: Final = torch.device("cpu")
NUM_TOKENS: Final = 32
LORA: Final = LoRASpec(rank=8, alpha=16, targets=["*.query", "*.value"])
LAST_BLOCK: Final = "encoder.layer.5"
RATE: Final = 2e-5
KINDS: Final = ("full", "last block", "LoRA")


class Book:
    """The record of one run, in this process."""

    def __init__(self, known: KnownRun) -> None:
        self.known = known

    def run(self, run_id: str) -> KnownRun | None:
        return self.known

    def kept_steps(self, run_id: str) -> Sequence[KeptStep]:
        return []

    def states_written(self, run_id: str, *, steps: Sequence[int], size_bytes: int) -> None: ...


class Silent:
    def step(self, phase: str, done: int, total: int) -> None: ...


def on_the_box(kind: str, towers: dict[str, Batch], folder: Path) -> Callable[[], float]:
    """Return what makes a run's next step and returns its loss."""
    folder.mkdir()
    models = folder / "models.toml"
    models.write_text(f'[models.minilm]\nbuilder = "hf"\nsource = "{model_folder()}"\n')
    registry = Registry(read_models_file(models), device=CPU)
    version = registry.get("minilm").version
    blobs = BlobStore(folder)
    groups = []
    for name, batch in towers.items():
        content = save(batch)
        digest = hashlib.sha256(content).hexdigest()
        blobs.put(digest, [content])
        groups.append(InputGroup(name=name, shards=[ShardRef(blob=digest)]))
    run = RunSpec(
        model="minilm",
        optimizer=OptimizerSpec(name="adamw", options={"lr": RATE}),
        wrt=[LAST_BLOCK] if kind == "last block" else None,
        adapter=LORA if kind == "LoRA" else None,
    )
    book = Book(KnownRun("r", run, version, 0, ""))
    runs, kept = RunStates(StateFiles(folder / "runs"), book, device=CPU), KeptGraphs()
    loss = GraphLoss(function=TracedFunction(graph=trace(info_nce, arguments=list(towers)).graph))
    pooling = trace(mean_pooling, positional=2, structured=True)

    def step() -> float:
        number = book.known.num_steps + 1
        spec = StepSpec(
            computation="step",
            run="r",
            number=number,
            model="minilm",
            wrt=run.wrt,
            mode="train",
            seed=step_seed(0, number),
            inputs=groups,
            output="last_hidden_state",
            readout=TracedFunction(graph=pooling.graph),
            loss=loss,
        )
        work = Work(
            job_id=f"j{number}",
            attempt=1,
            model="minilm",
            model_version=version,
            spec=spec,
            spec_digest=spec_digest(spec),
            result_path=folder / "results" / f"j{number}.safetensors",
            queued_s=0.0,
        )
        answer = Execution(
            work=work, registry=registry, blobs=blobs, kept=kept, observer=Silent(), runs=runs
        ).attempt()
        assert isinstance(answer, Finished), answer
        assert answer.step is not None
        assert answer.step.loss is not None
        book.known = replace(book.known, num_steps=number, last_job=work.job_id)
        return answer.step.loss

    return step


def at_home(kind: str, towers: dict[str, Batch]) -> Callable[[], float]:
    """Return what makes the plain loop's next step and returns its loss."""
    from transformers import AutoModel

    model: nn.Module = AutoModel.from_pretrained(model_folder(), use_safetensors=True)
    if kind == "LoRA":
        model = adapted(model, LORA, seed=0)
    wanted = {"full": "", "last block": LAST_BLOCK, "LoRA": "lora_"}[kind]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(wanted in name)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.01, fused=True)
    number = 0

    def step() -> float:
        nonlocal number
        number += 1
        optimizer.zero_grad()
        zs = {}
        for group, (name, batch) in enumerate(towers.items()):
            with shard_stream(step_seed(0, number), group=group, shard=0):
                zs[name] = mean_pooling(model(**batch).last_hidden_state, batch)
        loss = info_nce(**zs)
        torch.autograd.backward(loss)
        nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        optimizer.step()
        return float(loss.detach())

    return step


def main(arguments: Sequence[str] | None = None) -> None:
    """Print, for each kind, the medians over rounds of box ÷ plain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    options = parser.parse_args(arguments)
    reuse_memory()
    towers = text_pairs(options.pairs, num_tokens=NUM_TOKENS)
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            runs = {
                "box": on_the_box(kind, towers, Path(folder) / "box"),
                "plain": at_home(kind, towers),
            }
            losses = {name: [run(), run(), run()] for name, run in runs.items()}
            seconds = interleaved(runs, rounds=options.rounds)
        apart = max(abs(a - b) for a, b in zip(losses["box"], losses["plain"], strict=True))
        row: dict[str, Any] = {
            "kind": kind,
            "pairs": options.pairs,
            "wall": round(median_ratio(seconds["box"], seconds["plain"], cpu=False), 3),
            "cpu": round(median_ratio(seconds["box"], seconds["plain"], cpu=True), 3),
            "plain_ms": round(1e3 * sorted(s.wall for s in seconds["plain"])[options.rounds // 2]),
            "loss_apart": apart,
            "at": time.strftime("%Y-%m-%d %H:%M"),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
