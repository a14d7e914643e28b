"""The jobs of the ten-person day, made from rows of its mix.

Inputs are drawn from the seed, so that two jobs of a row have the same cost and other values.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.source_trees import ROOT
from gradbox import Forward, Gradient, Jacobian, PerSampleGradient
from gradbox.computations import Computation
from gradbox_worker.demo.task import OUTPUT, info_nce, mean_pooling, model_folder

MIX: Final = Path(__file__).with_name("day_mix.csv")
EXAMPLES: Final = ROOT / "examples"
NUM_TOKENS: Final = 16
VOCABULARY: Final = 30_000
NUM_CLASSES: Final = 10
SIDE: Final = 32

Shards = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Row:
    """What one person sends all day."""

    person: str
    computation: str
    model: str
    samples: int
    shard: int
    at_once: int
    pause_min: float
    recorded_from: str

    def job(self, seed: int) -> Computation:
        """Return one of the person's jobs."""
        return JOBS[self.computation](self, torch.Generator().manual_seed(seed))


def read_mix(path: Path = MIX) -> list[Row]:
    """Return the rows of the table."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return [
        Row(
            person=row["person"],
            computation=row["computation"],
            model=row["model"],
            samples=int(row["samples"]),
            shard=int(row["shard"]),
            at_once=int(row["at_once"]),
            pause_min=float(row["pause_min"]),
            recorded_from=row["recorded_from"],
        )
        for row in csv.DictReader(lines)
    ]


def models_file() -> str:
    """Return the text of the models file of a box that runs them."""
    sources = {
        "minilm": ("hf", str(model_folder())),
        "cnn": ("python", f"{ROOT / 'benchmarks' / 'set_loss' / 'encoders.py'}:ConvEncoder"),
        "digits": ("python", f"{EXAMPLES / 'digits.py'}:classifier"),
    }
    return "".join(
        f"[models.{name}]\nbuilder = {json.dumps(builder)}\nsource = {json.dumps(source)}\n"
        for name, (builder, source) in sources.items()
    )


def _contrastive(row: Row, draw: torch.Generator) -> Computation:
    return Gradient(
        model=row.model,
        inputs={name: _texts(row, draw) for name in ("queries", "passages")},
        output=OUTPUT,
        readout=mean_pooling,
        loss=info_nce,
        mode="train",
    )


def _classifier(row: Row, draw: torch.Generator) -> Computation:
    return Gradient(
        model=row.model,
        inputs=_shards(row, _pixels(row, draw)),
        loss=lambda z, labels: F.cross_entropy(z, labels),
        loss_inputs={"labels": _labels(row, draw)},
        mode="train",
    )


def _embeddings(row: Row, draw: torch.Generator) -> Computation:
    inputs = _texts(row, draw)
    return Forward(model=row.model, inputs=inputs, output=OUTPUT, readout=mean_pooling)


def _norms(row: Row, draw: torch.Generator) -> Computation:
    return PerSampleGradient(
        model=row.model,
        inputs=_texts(row, draw),
        output=OUTPUT,
        readout=mean_pooling,
        loss=lambda z: (z * z).sum(-1),
        reduce="norm",
    )


def _projection(row: Row, draw: torch.Generator) -> Computation:
    return _per_sample(row, draw, reduce="projection", dim=64)


def _clipped_sum(row: Row, draw: torch.Generator) -> Computation:
    return _per_sample(row, draw, reduce="clipped_sum", clip=1.0)


def _factored(row: Row, draw: torch.Generator) -> Computation:
    return _per_sample(row, draw, form="factored")


def _gram(row: Row, draw: torch.Generator) -> Computation:
    return Jacobian(model=row.model, inputs=_shards(row, _pixels(row, draw)), reduce="gram")


def _per_sample(row: Row, draw: torch.Generator, **how: object) -> Computation:
    return PerSampleGradient(
        model=row.model,
        inputs=_shards(row, _pixels(row, draw)),
        loss=lambda z, labels: F.cross_entropy(z, labels, reduction="none"),
        loss_inputs={"labels": _labels(row, draw)},
        **how,  # type: ignore[arg-type]
    )


def _texts(row: Row, draw: torch.Generator) -> Shards:
    ids = torch.randint(1000, VOCABULARY, (row.samples, NUM_TOKENS), generator=draw)
    return [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids.split(row.shard)]


def _pixels(row: Row, draw: torch.Generator) -> Tensor:
    if row.model == "digits":
        return torch.rand(row.samples, 64, generator=draw, dtype=torch.float64)
    return torch.rand(row.samples, 3, SIDE, SIDE, generator=draw)


def _labels(row: Row, draw: torch.Generator) -> Tensor:
    return torch.randint(NUM_CLASSES, (row.samples,), generator=draw)


def _shards(row: Row, samples: Tensor) -> list[Tensor]:
    return list(samples.split(row.shard))


JOBS: Final[Mapping[str, Callable[[Row, torch.Generator], Computation]]] = {
    "contrastive": _contrastive,
    "classifier": _classifier,
    "embeddings": _embeddings,
    "norms": _norms,
    "projection": _projection,
    "clipped_sum": _clipped_sum,
    "factored": _factored,
    "gram": _gram,
}
