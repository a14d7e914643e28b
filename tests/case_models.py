"""The models of the problem table: small, in float64, each with something that goes wrong easily.

Each factory takes no arguments and gives the same weights every time, so that `models.toml` can
name it and a test can build its twin. Shape legend: B samples, T positions, D features, V words.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WEIGHTS_SEED = 7


def seeded(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Give a factory the same initial weights every time, in float64."""

    @wraps(factory)
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(WEIGHTS_SEED)
            return factory().double()

    return build


@seeded
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


@seeded
def inplace_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 8),
        nn.ELU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(8, 8),
        nn.Dropout(0.3, inplace=True),
        nn.ReLU(inplace=True),
        nn.Linear(8, 3),
    )


@seeded
def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout2d(0.3),
        nn.Conv2d(4, 6, 3),
        nn.BatchNorm2d(6, momentum=None),
        nn.GELU(),
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(6 * 4 * 4, 3),
    )


class MovingAverage(nn.Module):
    """Centres its input by a moving average that it updates first; the output depends on both."""

    average: Tensor

    def __init__(self, update: str) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)
        self.register_buffer("average", torch.linspace(-1, 1, 4))
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).tanh()
        if self.training:
            new = 0.7 * self.average + 0.3 * hidden.detach().mean(0)
            if self.update == "in_place":
                self.average.copy_(new)
            elif self.update == "data":
                self.average.data.mul_(0.7).add_(hidden.detach().mean(0), alpha=0.3)
            else:
                self.average = new
        # Multiplying, so that the buffer is saved for backward.
        return self.head((hidden - self.average) * self.average.clone().exp())


@seeded
def average_in_place() -> nn.Module:
    return MovingAverage("in_place")


@seeded
def average_by_data() -> nn.Module:
    return MovingAverage("data")


@seeded
def average_rebound() -> nn.Module:
    return MovingAverage("rebound")


class SavesItsAverage(nn.Module):
    """Multiplies by a buffer that it rebinds, so that its graph holds the buffer itself."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 4)
        self.register_buffer("average", torch.linspace(0.5, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).tanh()
        self.average = 0.7 * self.average + 0.3 * hidden.detach().abs().mean(0)
        return hidden * self.average


@seeded
def saves_its_average() -> nn.Module:
    return SavesItsAverage()


@seeded
def spectral() -> nn.Module:
    parametrized = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), parametrized, nn.Tanh(), nn.Linear(8, 3))


@seeded
def classic_spectral() -> nn.Module:
    normed = torch.nn.utils.spectral_norm(nn.Linear(8, 8).double())
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), normed, nn.Tanh(), nn.Linear(8, 3))


class Transformer(nn.Module):
    """Two layers with dropout; the embedding is also the output matrix. Returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        padding = None if mask is None else ~mask
        hidden_BTD = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        return {"hidden": hidden_BTD, "logits": self.out(hidden_BTD), "layers": (hidden_BTD, None)}


@seeded
def transformer() -> nn.Module:
    return Transformer()


class Recurrent(nn.Module):
    """An LSTM with dropout between its layers; returns (outputs, (h, c))."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        outputs_BTD, state = self.lstm(x)
        return outputs_BTD, state


@seeded
def recurrent() -> nn.Module:
    return Recurrent()


class Towers(nn.Module):
    """Two encoders behind two methods, and one projection that both share."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2))
        self.texts = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.projection = nn.Linear(8, 5)

    def encode_image(self, pixels: Tensor) -> Tensor:
        return self.projection(self.images(pixels))

    def encode_text(self, features: Tensor) -> Tensor:
        return self.projection(self.texts(features))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.encode_image(pixels)


@seeded
def towers() -> nn.Module:
    return Towers()


class LayerDrop(nn.Module):
    """Skips layers by Python's `random`, and adds noise by NumPy's global generator."""

    def __init__(self, *, by_numpy: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.by_numpy = by_numpy

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self._draw() > 0.4:
                x = x + torch.tanh(layer(x)) * self._draw()
        return x

    def _draw(self) -> float:
        if not self.by_numpy:
            return random.random()
        import numpy

        return float(numpy.random.random())


@seeded
def layer_drop() -> nn.Module:
    return LayerDrop(by_numpy=False)


@seeded
def numpy_drop() -> nn.Module:
    return LayerDrop(by_numpy=True)


class Scalars(nn.Module):
    """Gives one number for each call: z of a shard is 0-dim."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.linear(x)).sum()


@seeded
def scalars() -> nn.Module:
    return Scalars()


class Frozen(nn.Module):
    """A stem that nobody trains, an integer parameter, and a branch that z does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)
        self.counts = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x)) + self.counts


@seeded
def frozen() -> nn.Module:
    return Frozen()


class RunAgain(torch.autograd.Function):
    """A block without a graph, which its backward makes again: as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.x, ctx.block = x.detach(), block
        with torch.no_grad():
            found: Tensor = block(x)
        return found

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), cotangent)
        return x.grad, None
