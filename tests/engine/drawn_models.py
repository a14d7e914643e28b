"""Models of random layers, which use their parameters in the ways that models in the field do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH: Final = 4
MAX_LENGTH: Final = 5
NUM_OUTPUTS: Final = 3
SQUARE: Final = (WIDTH, WIDTH)
ROW: Final = (WIDTH,)
NUMBER: Final[tuple[int, ...]] = ()
BY_LENGTH: Final = (MAX_LENGTH, MAX_LENGTH)

# Legend: h (b, t, WIDTH), b samples of t positions.
Layer = tuple[tuple[tuple[int, ...], ...], Callable[..., Tensor]]


def attention(h: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return h + ((h @ q) @ (h @ k).mT / 2).softmax(-1) @ (h @ v)


def fused_attention(h: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in F.linear(h, w).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def biased_attention(h: Tensor, q: Tensor, bias: Tensor) -> Tensor:
    length = h.shape[1]
    return h + ((h @ q) @ h.mT + bias[:length, :length]).softmax(-1) @ h


def recurrence(h: Tensor, w: Tensor, u: Tensor, begin: Tensor) -> Tensor:
    state, states = begin.expand(len(h), WIDTH), []
    for x in h.unbind(1):
        state = torch.tanh(F.linear(state, w) + x @ u)
        states.append(state)
    return torch.stack(states, 1)


def first_position_scaled(h: Tensor, scale: Tensor) -> Tensor:
    h = h.clone()
    h[:, 0] = h[:, 0].clone() * scale
    return h


def last_position_set(h: Tensor, value: Tensor) -> Tensor:
    h = h.clone()
    h[:, -1] = value
    return h


def token_before(h: Tensor, token: Tensor) -> Tensor:
    return torch.cat([token.expand(len(h), 1, WIDTH), h], 1)[:, :MAX_LENGTH]


def experts(h: Tensor, w: Tensor, gate: Tensor) -> Tensor:
    """Each position goes to one of two experts."""
    x = h.reshape(-1, WIDTH)
    share, chosen = (x @ gate).softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for expert in range(2):
        rows = (chosen == expert).nonzero()[:, 0]
        out = out.index_add(0, rows, (x[rows] @ w[expert]) * share[rows, None])
    return out.reshape(h.shape)


LAYERS: Final[dict[str, Layer]] = {
    "linear": ((SQUARE, ROW), F.linear),
    "product": ((SQUARE,), lambda h, w: (h @ w).tanh()),
    "rows of a larger weight": (((9, WIDTH),), lambda h, w: F.linear(h, w[3:7]).tanh()),
    "columns of a larger weight": (((WIDTH, 8),), lambda h, w: F.linear(h, w[:, ::2])),
    "einsum": ((SQUARE,), lambda h, w: torch.einsum("btd,de->bte", h, w)),
    "einsum of heads": (
        ((2, WIDTH, 2),),
        lambda h, w: torch.einsum("btd,nde->btne", h, w).flatten(2),
    ),
    "scale and shift": ((ROW, ROW), lambda h, w, b: h * w + b),
    "one number": ((NUMBER,), lambda h, w: h * torch.sigmoid(w) + w),
    "positions": (((MAX_LENGTH, WIDTH),), lambda h, w: h + w[: h.shape[1]]),
    "embedded positions": (
        ((MAX_LENGTH, WIDTH),),
        lambda h, w: h + F.embedding(torch.arange(h.shape[1]), w),
    ),
    "table by value": (((7, WIDTH),), lambda h, w: h + w[(h[..., 0] > 0).long() * 3]),
    "one-hot": (((2, WIDTH),), lambda h, w: h + F.one_hot((h[..., 0] > 0).long(), 2).to(h) @ w),
    "layer norm": ((ROW, ROW), lambda h, w, b: F.layer_norm(h, ROW, w, b)),
    "group norm": ((ROW, ROW), lambda h, w, b: F.group_norm(h.mT, 2, w, b).mT),
    "rms norm": (
        (ROW,),
        lambda h, w: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-3) * (1 + w),
    ),
    "attention": ((SQUARE, SQUARE, SQUARE), attention),
    "fused attention": (((3 * WIDTH, WIDTH),), fused_attention),
    "attention with a bias": ((SQUARE, BY_LENGTH), biased_attention),
    "convolution": (
        ((WIDTH, WIDTH, 3), ROW),
        lambda h, w, b: F.conv1d(h.mT, w, b, padding=1).mT,
    ),
    "convolution by channel": (
        ((WIDTH, 1, 3),),
        lambda h, w: F.conv1d(h.mT, w, None, padding=1, groups=WIDTH).mT.tanh(),
    ),
    "running sum": ((ROW,), lambda h, w: (h * w).cumsum(1) / 2),
    "rolled": ((SQUARE,), lambda h, w: h + h.roll(1, 1) @ w),
    "mixed positions": (
        (BY_LENGTH,),
        lambda h, w: torch.einsum("ts,bsd->btd", w[: h.shape[1], : h.shape[1]], h),
    ),
    "gate": ((SQUARE, ROW), lambda h, w, b: h * torch.sigmoid(F.linear(h, w, b))),
    "weight through tanh": ((SQUARE,), lambda h, w: h @ w.tanh()),
    "weight times itself": ((SQUARE,), lambda h, w: h @ (w @ w.T) / 2),
    "weight norm": (
        (SQUARE, (WIDTH, 1)),
        lambda h, v, g: F.linear(h, g * v / v.norm(dim=1, keepdim=True)),
    ),
    "two halves": (((2, WIDTH), (2, WIDTH)), lambda h, a, b: F.linear(h, torch.cat([a, b]))),
    "outer product": ((ROW, ROW), lambda h, a, b: h @ torch.outer(a, b)),
    "product of two": ((SQUARE, SQUARE), lambda h, a, b: (h @ a) * (h @ b)),
    "in place": ((ROW,), lambda h, b: h.clone().add_(b).relu_()),
    "one position scaled": ((ROW,), first_position_scaled),
    "one position set": ((ROW,), last_position_set),
    "token before": ((ROW,), token_before),
    "leak": ((ROW,), lambda h, w: torch.where(h > 0, h, w * h)),
    "where": ((ROW,), lambda h, w: torch.where(h > 0.3, h, w)),
    "maximum": ((ROW,), torch.maximum),
    "clamp": ((ROW,), lambda h, w: torch.clamp(h, min=w - 1, max=w + 1)),
    "prelu": ((ROW,), lambda h, w: F.prelu(h.mT, w).mT),
    "power": ((ROW,), lambda h, w: h.abs().add(0.1).pow(w.sigmoid())),
    "bilinear": (
        ((WIDTH, WIDTH, WIDTH), ROW),
        lambda h, w, b: F.bilinear(h, h.tanh(), w, b),
    ),
    "flattened": ((SQUARE,), lambda h, w: (h.reshape(-1, WIDTH) @ w).reshape(h.shape)),
    "time first": ((SQUARE,), lambda h, w: (h.transpose(0, 1) @ w).transpose(0, 1).sin()),
    "recurrence": ((SQUARE, SQUARE, ROW), recurrence),
    "prototypes": (
        ((6, WIDTH),),
        lambda h, w: (-(h[:, :, None] - w).square().sum(-1)).softmax(-1) @ w,
    ),
    "experts": (((2, WIDTH, WIDTH), (WIDTH, 2)), experts),
    "batched product": (
        (SQUARE, ROW),
        lambda h, w, b: torch.baddbmm(
            b.expand(len(h), 1, WIDTH), h, w.expand(len(h), WIDTH, WIDTH)
        ),
    ),
    "spectrum": (
        (ROW,),
        lambda h, w: torch.fft.irfft(torch.fft.rfft(h) * torch.fft.rfft(w), n=WIDTH),
    ),
}
POOLS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "mean": lambda h: h.mean(1),
    "largest": lambda h: h.amax(1),
    "first": lambda h: h[:, 0],
    "last": lambda h: h[:, -1],
}


class DrawnModel(nn.Module):
    """(b, t, WIDTH) → (b, NUM_OUTPUTS), t at most MAX_LENGTH; layers may share square weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._of, self._numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        self.names = self._of.choices(sorted(LAYERS), k=self._of.randint(2, 5))
        self.pool = self._of.choice(sorted(POOLS))
        self._taken = [[self._parameter(shape) for shape in LAYERS[n][0]] for n in self.names]
        self._head = self._parameter((NUM_OUTPUTS, WIDTH))
        self._dropout = nn.Dropout(0.3)

    def _parameter(self, shape: tuple[int, ...]) -> str:
        """Return the name of a new parameter, or of one that is there already."""
        alike = [name for name, p in self.named_parameters() if p.shape == SQUARE == shape]
        if alike and self._of.random() < 0.35:
            return self._of.choice(alike)
        name = f"p{len(list(self.parameters()))}"
        numbers = torch.randn(shape, dtype=torch.float64, generator=self._numbers)
        self.register_parameter(name, nn.Parameter(numbers / 2))
        return name

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for name, taken in zip(self.names, self._taken, strict=True):
            h = self.between(name, LAYERS[name][1](h, *(getattr(self, p) for p in taken)))
        return F.linear(POOLS[self.pool](self._dropout(h)), getattr(self, self._head))

    def between(self, name: str, h: Tensor) -> Tensor:
        """Return what goes on to the next layer."""
        return h


def samples(seed: int, sizes: list[int]) -> list[dict[str, Any]]:
    """Return shards of these sizes, all of one length."""
    numbers = torch.Generator().manual_seed(seed)
    length = 1 + seed % MAX_LENGTH
    return [
        {"0": torch.randn(size, length, WIDTH, dtype=torch.float64, generator=numbers)}
        for size in sizes
    ]
