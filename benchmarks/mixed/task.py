"""The task of the mixed-gradient benchmark: a gradient penalty through a deep frozen generator.

t = Σ_b (‖∂inner/∂z_b‖ − 1)² with inner(y, v) cubic in the image v and quadratic in y: what one
differentiates to train a critic or an energy on a generator's latent space. Shapes: B samples of
a shard, 64 latents, 32 × 32 pixels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, Observer, mixed_gradient

LATENTS = 64
CHANNELS = 32
PIXELS = 32
ACTIVATION_BYTES = CHANNELS * PIXELS * PIXELS * 4
"""Of one sample, between two layers of a block."""


class Block(nn.Module):
    """A residual block of two convolutions with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
            nn.BatchNorm2d(CHANNELS),
            nn.ReLU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + 0.1 * self.branch(x)
        return out


def generator(depth: int) -> nn.Module:
    """Return G: latents to images through two transposed convolutions and `depth` blocks."""
    torch.manual_seed(0)
    side = PIXELS // 4
    return nn.Sequential(
        nn.Linear(LATENTS, CHANNELS * side * side),
        nn.Unflatten(1, (CHANNELS, side, side)),
        nn.ConvTranspose2d(CHANNELS, CHANNELS, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(CHANNELS, CHANNELS, 4, stride=2, padding=1),
        *(Block() for _ in range(depth)),
        nn.Conv2d(CHANNELS, 3, 3, padding=1),
        nn.Tanh(),
    ).eval()


class Task:
    """N shards of latents, and the two ways to dt/dy."""

    def __init__(self, *, num_shards: int, shard: int, depth: int) -> None:
        self.generator = generator(depth).requires_grad_(False)
        self.shards = [torch.randn(shard, LATENTS) for _ in range(num_shards)]
        self.y = torch.randn(3, PIXELS, PIXELS).requires_grad_()

    def gradbox(self, observer: Observer | None = None) -> Tensor:
        """Return dt/dy by the engine."""
        result = mixed_gradient(
            self.generator,
            Group("z", [{"0": z} for z in self.shards]),
            Objective(inner, {"y": self.y}, {"y": self.y}),
            Objective(outer),
            observer=observer,
        )
        return result.grads["y"]

    def double_backward(self) -> Tensor:
        """Return dt/dy by a graph of everything, and of its gradient."""
        gradients: list[Tensor] = []
        for shard in self.shards:
            z = shard.clone().requires_grad_()
            value = inner(self.y, self.generator(z))
            gradients += torch.autograd.grad(value, z, create_graph=True)
        (gradient,) = torch.autograd.grad(outer(torch.cat(gradients)), self.y)
        return gradient


METHODS: dict[str, Callable[[Task], Tensor]] = {
    "gradbox": Task.gradbox,
    "double backward": Task.double_backward,
}


def inner(y: Tensor, v: Tensor) -> Tensor:
    """Return one number for a batch of images."""
    return (v * y).sum() + (v**3 * y**2).sum()


def outer(dfdz: Tensor) -> Tensor:
    """Return the gradient penalty."""
    penalty: Tensor = (dfdz.norm(dim=1) - 1).square().sum()
    return penalty
