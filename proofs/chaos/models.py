"""The box's models: those of the problem tables that hold state, and one that takes its time."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from tests.case_models import seeded

CALL_S = 0.03


class Unhurried(nn.Module):
    """Dropout, batch norm and a wide layer; each call takes 30 ms, so that faults meet its jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 256),
            nn.BatchNorm1d(256),
            nn.Dropout(0.3),
            nn.Tanh(),
            nn.Linear(256, 256),
            nn.GELU(),
            nn.Linear(256, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(CALL_S)
        return self.layers(x)


@seeded
def unhurried() -> nn.Module:
    return Unhurried()


SOURCES = {
    "mlp": "tests.case_models:mlp",
    "cnn": "tests.case_models:cnn",
    "inplace_mlp": "tests.case_models:inplace_mlp",
    "towers": "tests.case_models:towers",
    "generator": "tests.mixed_models:generator",
    "unhurried": "proofs.chaos.models:unhurried",
}


def write_models(path: Path, sources: Mapping[str, str] = SOURCES) -> Path:
    """Write a models file of Python builders."""
    entries = {
        name: f'[models.{name}]\nbuilder = "python"\nsource = {json.dumps(source)}\n'
        for name, source in sources.items()
    }
    if "towers" in entries:
        entries["towers"] += 'methods = ["encode_image", "encode_text"]\n'
    path.write_text("\n".join(entries.values()))
    return path
