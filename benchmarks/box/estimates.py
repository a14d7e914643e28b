"""What `client.estimate` says of jobs, beside what they then take by their receipts.

Twelve jobs of all kinds on a box with one worker on the CPU. Each is estimated and then run by the
same process; its receipt has both. Peaks are the process's, so what the interpreter and the model
take by themselves is in them: `before`. Seconds want a machine on which nothing else runs.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.page import MIB, section, table, verdicts
from gradbox import (
    Estimate,
    Forward,
    GradClient,
    Gradient,
    GradResult,
    Jacobian,
    MixedGradient,
    Optimizer,
    PerSampleGradient,
)
from gradbox.tensors.safetensors_header import DTYPE_BYTES
from gradbox_worker.demo.box import running_box

MODELS: Final = """\
import torch
from torch import nn

class Blocks(nn.Module):
    def __init__(self, width, depth, outputs):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
        self.blocks = nn.ModuleList(layers)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        for block in self.blocks:
            x = x + self.dropout(block(x))
        return self.head(x)

def wide():
    torch.manual_seed(0)
    return Blocks(512, 8, 64)

def narrow():
    torch.manual_seed(0)
    return Blocks(96, 4, 10)

def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )

def tokens():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(block, 3, enable_nested_tensor=False)
"""
# Where an estimate and a receipt may differ.
WITHIN: Final = 0.2


@dataclass(frozen=True)
class Compared:
    """One job: what was said of it, and what it took."""

    name: str
    estimate: Estimate
    peak_bytes: int
    before_bytes: int
    seconds: float
    result_bytes: int

    @classmethod
    def of(cls, name: str, estimate: Estimate, result: GradResult) -> Compared:
        """Read a receipt."""
        receipt = result.manifest
        assert receipt.estimate is not None
        took = receipt.seconds
        return cls(
            name,
            estimate,
            receipt.peak_memory_bytes,
            receipt.memory_before_bytes,
            took.forward + took.cotangents + took.replay + took.samples,
            result_bytes_of(result),
        )

    @property
    def off(self) -> Mapping[str, float]:
        """How far off the estimate is, relative to the truth."""
        said = self.estimate
        seconds = said.seconds or 0.0
        return {
            "peak": said.peak_retained_bytes / self.peak_bytes - 1,
            "result": (said.result_bytes + 1) / (self.result_bytes + 1) - 1,
            "seconds": seconds / max(1e-9, self.seconds) - 1,
        }


def result_bytes_of(result: GradResult) -> int:
    """Return what the tensors of a result take in its file."""
    stored = result._file.stored
    return sum(
        math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        for name, tensor in stored.items()
        if name not in ("checksums", "filler")
    )


def squares(z: Tensor) -> Tensor:
    return z.square().mean()


def pairs(a: Tensor, b: Tensor) -> Tensor:
    """Return InfoNCE of rows that belong together, over all of the others."""
    scores = a @ b.T / 10.0
    labels = torch.arange(len(scores), device=scores.device)
    return nn.functional.cross_entropy(scores, labels)


def each(z: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(z, labels, reduction="none")


def inner(w: Tensor, v: Tensor) -> Tensor:
    return (v @ w).tanh().square().sum()


def outer(dfdz: Tensor, x: Tensor) -> Tensor:
    return (dfdz - x).square().mean()


def shards_of(number: int, rows: int, *shape: int) -> list[Tensor]:
    torch.manual_seed(rows)
    return [torch.randn(rows, *shape) for _ in range(number)]


def ragged(number: int, rows: int, width: int) -> list[Tensor]:
    return [torch.randn(rows - rows // 16 * (index % 4), width) for index in range(number)]


def workloads(rows: int = 2048) -> Mapping[str, Any]:
    """Return the jobs by name; of the training step, what the run's step takes.

    Args:
        rows: of a shard of the largest.
    """
    plain: dict[str, Any] = {"model": "wide", "inputs": shards_of(8, rows, 512), "mode": "train"}
    labels: dict[str, Any] = {"labels": torch.arange(256) % 10}
    narrow: dict[str, Any] = {"model": "narrow", "inputs": shards_of(8, 32, 96)}
    images = shards_of(8, rows // 64, 3, 48, 48)
    return {
        "gradient, retain=0": Gradient(**plain, loss=squares, retain=0),
        "gradient, graphs kept": Gradient(**plain, loss=squares),
        "two groups, InfoNCE, ragged": Gradient(
            model="wide",
            inputs={"a": ragged(4, rows // 2, 512), "b": ragged(4, rows // 2, 512)},
            loss=pairs,
            retain=0,
        ),
        "transformer, outputs too": Gradient(
            model="tokens",
            inputs=shards_of(6, rows // 256, 128, 256),
            loss=squares,
            mode="train",
            retain=0,
            returns=("grads", "outputs"),
        ),
        "batch norm, input gradients": Gradient(
            model="convolutions",
            inputs=images,
            loss=squares,
            mode="train",
            retain=0,
            returns=("grads", "input_grads"),
        ),
        "dense rows": PerSampleGradient(**narrow, loss=each, loss_inputs=labels, form="dense"),
        "Gram of rows": PerSampleGradient(**narrow, loss=each, loss_inputs=labels, reduce="gram"),
        "dense Jacobian": Jacobian(**narrow, form="dense"),
        "factored Jacobian": Jacobian(**narrow, form="factored"),
        "mixed gradient": MixedGradient(
            model="wide",
            inputs=shards_of(6, rows // 2, 512),
            inner=inner,
            outer=outer,
            y={"w": torch.randn(64, 64, requires_grad=True)},
            x={"x": torch.zeros(())},
        ),
        "forward": Forward(**plain),
        "training step": {"inputs": plain["inputs"], "loss": squares},
    }


def compared(client: GradClient, name: str, job: Any) -> Compared:
    """Estimate a job, run it, and compare."""
    if isinstance(job, dict):
        run = client.train("wide", optimizer=Optimizer("adamw", lr=1e-3))
        return Compared.of(name, run.estimate(**job), run.step(**job))
    return Compared.of(name, client.estimate(job), client.run(job))


@contextmanager
def estimating_box(folder: Path, *arguments: str) -> Iterator[GradClient]:
    """Run a box with the models of the workloads."""
    (folder / "models.py").write_text(MODELS)
    registered = "\n".join(
        f'[models.{name}]\nbuilder = "python"\nsource = "models.py:{name}"\n'
        for name in ("wide", "narrow", "convolutions", "tokens")
    )
    with (
        running_box(folder, registered=registered, arguments=arguments) as (url, token),
        GradClient(url, token) as client,
    ):
        yield client


def measure_estimates() -> list[Compared]:
    """Run the benchmark."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="gradbox-estimates-") as name:
        folder = Path(name)
        with estimating_box(folder) as client:
            return [compared(client, name, job) for name, job in workloads().items()]


def estimates_section(found: list[Compared]) -> str:
    """Describe the benchmark."""
    rows = [
        [
            one.name,
            f"{one.estimate.peak_retained_bytes / MIB:.0f}",
            f"{one.peak_bytes / MIB:.0f}",
            f"{one.before_bytes / MIB:.0f}",
            f"{one.off['peak']:+.0%}",
            f"{(one.estimate.seconds or 0.0):.2f}",
            f"{one.seconds:.2f}",
            f"{one.off['seconds']:+.0%}",
            f"{one.estimate.result_bytes / MIB:.2f}",
            f"{one.off['result']:+.0%}",
        ]
        for one in found
    ]
    head = [
        "job", "peak said, MiB", "peak, MiB", "before, MiB", "off",
        "said, s", "s", "off", "result said, MiB", "off",
    ]  # fmt: skip
    worst = {key: max(abs(one.off[key]) for one in found) for key in ("peak", "result", "seconds")}
    bars = [
        (off <= WITHIN, f"{key}: off by {off:.0%} at most, bar {WITHIN:.0%}")
        for key, off in worst.items()
    ]
    return section("Estimates", table(head, rows), verdicts(bars))
