"""The handwritten digits of scikit-learn and a small classifier of them, which the examples share.

The box builds `classifier`. The examples train a copy here and send its weights with each job, or
train it there as a run.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from gradbox import Builtin, GradClient, Optimizer, TrainRun

SHARD_SIZE = 50


def classifier() -> nn.Module:
    """Return the classifier, (B, 64) pixels → (B, 10) logits, in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()


def decoder() -> nn.Module:
    """Return a generator of digits, (B, 8) latents → (B, 64) pixels, in float64."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 64), nn.Sigmoid()).double()


def load(first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return pixels (B, 64) between 0 and 1, and labels (B,), of some digits."""
    digits = load_digits()
    pixels = torch.tensor(digits.data[first:last] / 16)
    return pixels, torch.tensor(digits.target[first:last])


def shards(pixels: Tensor) -> list[Tensor]:
    """Cut samples into shards."""
    return list(pixels.split(SHARD_SIZE))


def trained(pixels: Tensor, labels: Tensor, *, num_steps: int = 150) -> nn.Module:
    """Return a classifier trained here."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(num_steps):
        optimizer.zero_grad()
        F.cross_entropy(model(pixels), labels).backward()
        optimizer.step()
    return model


def trained_there(client: GradClient, pixels: Tensor, labels: Tensor) -> tuple[TrainRun, nn.Module]:
    """Return a run of the classifier after forty steps on the box, and a copy of its model here."""
    run = client.train("digits", optimizer=Optimizer("adam", lr=0.02))
    for _ in range(40):
        run.step(
            inputs=shards(pixels),
            loss=Builtin("cross_entropy"),
            loss_inputs={"labels": labels},
        )
    model = classifier()
    model.load_state_dict(run.weights())
    return run, model


def cross_entropy(z: Tensor, labels: Tensor) -> Tensor:
    """Return one loss a sample, (B,)."""
    return F.cross_entropy(z, labels, reduction="none")


def rows(model: nn.Module, values: Tensor) -> Tensor:
    """Return the gradient of every value (N,) by one backward pass each, (N, P): the check."""
    parameters = list(model.parameters())
    found = []
    for value in values:
        gradients = torch.autograd.grad(value, parameters, retain_graph=True)
        found.append(flat(gradients))
    return torch.stack(found)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return tensors as one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def report(
    what: str, found: Tensor, expected: Tensor, *, by: str = "local autograd", within: float = 1e-8
) -> None:
    """Print how far a result is from another one's, and fail if that is not rounding."""
    difference = float((found - expected).norm() / expected.norm())
    print(f"{what}: {difference:.1e} from {by}")
    if not difference < within:
        raise SystemExit(f"expected {what} as {by} has it")
