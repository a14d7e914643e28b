"""A tensor that a model keeps with its graph is an error, and never a missing gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, set_gradient
from gradbox_engine.errors import GraphInBuffer, ModelCallFailed
from tests.engine.replay.odd_models import rows as _shards


def _spread(z: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(z, z).square()).mean()


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class _Caching(_Model):
    """Computes something of its weight in its first call and uses it ever after."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = self.body[0].weight.norm()
        return self.body(x) * self.scale


def test_a_tensor_kept_with_its_graph_is_an_error_and_never_a_missing_gradient():
    model = _Caching()
    for _ in range(3):
        with pytest.raises(ModelCallFailed):
            set_gradient(model, [Group("z", _shards())], Objective(_spread), mode="train")


class _Remembering(_Model):
    """Leaves its mean in a buffer, with its graph where the first entry is large."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x) + self.memory
        self.memory = z.mean(0) if x[0, 0] > 1 else z.mean(0).detach()
        return z


def test_a_graph_in_a_buffer_is_refused_in_later_jobs_too():
    shards = _shards()
    for shard in shards:
        shard["0"][0, 0] = 0
    model = _Remembering()
    harmless = [Group("z", shards)]
    for _ in range(2):
        set_gradient(model, harmless, Objective(_spread), mode="train")
    shards[0]["0"][0, 0] = 2
    with pytest.raises(GraphInBuffer, match="memory"):
        set_gradient(model, harmless, Objective(_spread), mode="train")
