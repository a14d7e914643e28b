"""Frozen models G for the mixed problems, in float64. Shape legend: B samples, T positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.case_models import cnn, inplace_mlp, seeded

__all__ = ["cnn", "inplace_mlp"]


@seeded
def generator() -> nn.Module:
    """A small DCGAN generator: (B, 6) → (B, 1, 8, 8)."""
    return nn.Sequential(
        nn.Linear(6, 32),
        nn.Unflatten(1, (8, 2, 2)),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.LeakyReLU(0.1, inplace=True),
        nn.ConvTranspose2d(4, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


class Attention(nn.Module):
    """Fused attention with dropout between matrix products; also looks up constant words."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(7, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        hidden = hidden + self.words(tokens)
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norm(hidden)).chunk(3, -1))
        dropout = 0.2 if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return hidden + mixed.squeeze(1) @ self.out


class Transformer(nn.Module):
    """Two attention layers of our own and two of torch's; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor, hidden: Tensor) -> dict[str, Any]:
        for attention in self.attention:
            hidden = attention(hidden, tokens)
        return {"hidden": self.encoder(hidden)}


@seeded
def transformer() -> nn.Module:
    return Transformer()


class Recurrent(nn.Module):
    """An LSTM and a GRU: (B, T, 4) → (B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, dropout=0.3, batch_first=True)
        self.gru = nn.GRU(6, 3, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0])[0].mean(1)[:, :3]


@seeded
def recurrent() -> nn.Module:
    return Recurrent()


class Checkpointed(nn.Module):
    """Recomputes two blocks, with dropout in them, in its backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2)
        )
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x[:, :3]


def checkpointed(*, reentrant: bool) -> nn.Module:
    return seeded(lambda: Checkpointed(reentrant=reentrant))()


class Square(torch.autograd.Function):
    """x² with a backward that can be differentiated, and no forward-mode rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class SquareOnce(Square):
    """The same with a backward that cannot be differentiated."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class SquareShort(Square):
    """The same with a backward that has too little memory where it is recorded."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return Square.backward(ctx, gradient)


class Applies(nn.Module):
    """A linear layer, a function, and another linear layer: (B, 5) → (B, 3)."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x).tanh()))


def custom_functions() -> nn.Module:
    return seeded(lambda: Applies(Square.apply))()


def once_differentiable() -> nn.Module:
    return seeded(lambda: Applies(SquareOnce.apply))()


def short_of_memory() -> nn.Module:
    return seeded(lambda: Applies(SquareShort.apply))()


def normed() -> nn.Module:
    """Normalises rows by the fused operation behind `weight_norm`."""
    lengths = torch.ones(1, 4, dtype=torch.float64)
    return seeded(
        lambda: Applies(lambda hidden: torch._weight_norm(hidden, lengths.to(hidden), 1))
    )()


def distances() -> nn.Module:
    """Uses distances that are not Euclidean, which can be differentiated once and backward only."""
    points = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    return seeded(lambda: Applies(lambda hidden: torch.cdist(hidden, points.to(hidden), p=1.0)))()


def constant_branch() -> nn.Module:
    """Multiplies by what reverse mode takes for a constant and forward mode does not."""

    def gated(hidden: Tensor) -> Tensor:
        with torch.no_grad():
            gate = hidden.exp()
        return hidden * gate

    return seeded(lambda: Applies(gated))()


def transposed_norm() -> nn.Module:
    """Normalises groups of channels that lie in the last dim."""

    def normed_channels(hidden: Tensor) -> Tensor:
        channels_last = hidden[:, None, :] * torch.tensor([[1.0], [2.0]], dtype=hidden.dtype)
        return nn.functional.group_norm(channels_last.transpose(1, 2), 2).sum(2)

    return seeded(lambda: Applies(normed_channels))()


def sampled(*, by_matrix: bool = False) -> nn.Module:
    """Reads its features at points between them; `by_matrix` as a product, which is the same."""
    points = torch.linspace(-0.9, 0.8, 8, dtype=torch.float64).view(1, 2, 2, 2)

    def read(hidden: Tensor) -> Tensor:
        grid = points.to(hidden).expand(len(hidden), 2, 2, 2)
        image = hidden.view(-1, 1, 2, 2)
        return nn.functional.grid_sample(image, grid, align_corners=False).flatten(1)

    matrix = read(torch.eye(4, dtype=torch.float64))
    return seeded(lambda: Applies((lambda x: x @ matrix.to(x)) if by_matrix else read))()


def vectorised() -> nn.Module:
    """Maps a function of one row over the rows."""
    weight = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)

    def mapped(hidden: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: torch.tanh(weight.to(row) @ row) * row)(hidden)

    return seeded(lambda: Applies(mapped))()


def rounded() -> nn.Module:
    """Rounds to float32 on the way, as a language model's norms do."""
    return seeded(lambda: Applies(lambda hidden: hidden.float().sin().to(hidden)))()


def implicit(*, solved_apart: bool, recorded: bool = False) -> nn.Module:
    """A layer whose output is a fixed point, with a hook that solves for its gradient.

    Args:
        solved_apart: whether forward mode cannot follow the solver.
        recorded: whether the hook's backward passes are differentiable.
    """
    weight = torch.linspace(-0.4, 0.3, 16, dtype=torch.float64).view(4, 4)

    def fixed_point(hidden: Tensor) -> Tensor:
        def step(point: Tensor) -> Tensor:
            return torch.tanh(point @ weight.to(point) + hidden)

        with torch.no_grad():
            point = torch.zeros_like(hidden)
            for _ in range(60):
                point = step(point)
            point = point.detach() if solved_apart else point
        if not hidden.requires_grad:
            return step(point)
        free = point.detach().requires_grad_()
        again = step(free)

        def solve(gradient: Tensor) -> Tensor:
            total = gradient
            for _ in range(60):
                (part,) = torch.autograd.grad(
                    again, free, total, retain_graph=True, create_graph=recorded
                )
                total = gradient + part
            return total

        found = step(point)
        found.register_hook(solve)
        return found

    return seeded(lambda: Applies(fixed_point))()


def clipped() -> nn.Module:
    """Clips gradients on their way back."""

    def through(hidden: Tensor) -> Tensor:
        found = hidden.sin()
        if found.requires_grad:
            found.register_hook(lambda gradient: gradient.clamp(-0.3, 0.3))
        return found

    return seeded(lambda: Applies(through))()
