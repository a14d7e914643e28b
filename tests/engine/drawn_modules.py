"""Models of random modules: what torch.nn, its utilities and models in the field are made of.

`drawn_models` draws ways to use a parameter; these draw what surrounds it: state, hooks, random
numbers, checkpoints, parametrisations, functions of functions.

Legend: h (b, t, WIDTH), b samples of t positions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint

WIDTH: Final = 4
NUM_OUTPUTS: Final = 3


class Part(nn.Module):
    """h → h by a function of the part's own submodules, parameters and buffers."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **members: Any) -> None:
        super().__init__()
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)
        self.__dict__["_function"] = function
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self._function(self, h)
        return found


def linear(width: int = WIDTH, **terms: Any) -> nn.Linear:
    return nn.Linear(WIDTH, width, **terms)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 2)


class Reversed(torch.autograd.Function):  # Ganin & Lempitsky 2015
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * g, None


class WithSigns(torch.autograd.Function):
    """(x w, whether x is positive): the second has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        ctx.save_for_backward(x, w)
        return x * w, positive

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum((0, 1))


def packed(m: Any, h: Tensor) -> Tensor:
    lengths = torch.arange(len(h)) % h.shape[1] + 1
    sequences = rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
    padded, _ = rnn.pad_packed_sequence(m.a(sequences)[0], True, total_length=h.shape[1])
    return padded


def fused(m: Any, h: Tensor) -> Tensor:
    q, k, v = m.a(h).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 * m.training, is_causal=True)


def hooked(m: Any, h: Tensor) -> Tensor:
    h = m.a(h)
    if h.requires_grad:
        h.register_hook(lambda g: g / 4)
    return h


def shrunk(linear: nn.Linear) -> nn.Linear:
    linear.weight.register_hook(lambda g: g / 3)
    linear.register_full_backward_hook(
        lambda _m, gi, _go: tuple(g if g is None else g / 2 for g in gi)
    )
    return linear


def moving(m: Any, h: Tensor) -> Tensor:
    h = m.a(h)
    m.mean.mul_(0.9).add_(0.1 * h.detach().mean((0, 1)))
    return h * m.mean.exp()


def moving_anew(m: Any, h: Tensor) -> Tensor:
    h = m.a(h) - m.mean
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean((0, 1))
    return h


def relaxed(m: Any, h: Tensor) -> Tensor:
    """One step down an energy's slope."""
    x = h if h.requires_grad else h.detach().requires_grad_()
    with torch.enable_grad():
        energy = (x @ m.w).sin().square().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
    return x - slope


def without_grad(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        gate = m.b(h).sigmoid()
    return m.a(h) * gate


def inferred(m: Any, h: Tensor) -> Tensor:
    with torch.inference_mode():
        gate = m.b(h).sigmoid()
    return m.a(h) * gate.clone()


def remembered(m: Any, h: Tensor) -> Tensor:
    if not hasattr(m, "angles"):
        m.angles = {}
    if h.shape[1] not in m.angles:
        m.angles[h.shape[1]] = torch.arange(h.shape[1], dtype=h.dtype)[:, None].cos()
    return m.a(h) * m.angles[h.shape[1]]


def in_place(m: Any, h: Tensor) -> Tensor:
    h = m.a(h).clone()
    h[:, 0] *= 2
    h.transpose(1, 2).mul_(0.5)
    return h.add_(m.w).relu_()


def checkpointed(**terms: Any) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, h: checkpoint(lambda x: m.drop(m.b(x).tanh()), m.a(h), **terms)  # type: ignore[no-any-return]


def signs(h: Tensor) -> Tensor:
    return (h[..., 0] > 0).long()


PARTS: Final[dict[str, Callable[[], nn.Module]]] = {
    "linear": lambda: Part(lambda m, h: m.a(h).tanh(), a=linear()),
    "conv1d": lambda: Part(lambda m, h: m.a(h.mT).mT, a=nn.Conv1d(4, 4, 3, padding=1, groups=2)),
    "conv2d": lambda: Part(lambda m, h: m.a(h[:, None]).sum(1), a=nn.Conv2d(1, 2, 3, padding=1)),
    "conv3d": lambda: Part(
        lambda m, h: m.a(h[:, None, :, :, None]).sum((1, 4)), a=nn.Conv3d(1, 2, 3, padding=1)
    ),
    "transposed": lambda: Part(
        lambda m, h: m.a(h.mT).mT[:, : h.shape[1]], a=nn.ConvTranspose1d(4, 4, 3, stride=2)
    ),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "group norm": lambda: Part(lambda m, h: m.a(h.mT).mT, a=nn.GroupNorm(2, WIDTH)),
    "instance norm": lambda: Part(
        lambda m, h: m.a(h.mT.repeat(1, 1, 2)).mT[:, : h.shape[1]],
        a=nn.InstanceNorm1d(WIDTH, affine=True),
    ),
    "batch norm": lambda: Part(lambda m, h: m.a(h.mT).mT, a=nn.BatchNorm1d(WIDTH)),
    "averaging batch norm": lambda: Part(
        lambda m, h: m.a(h.mT).mT, a=nn.BatchNorm1d(WIDTH, momentum=None)
    ),
    "gru": lambda: Part(
        lambda m, h: m.a(h.transpose(0, 1))[0].transpose(0, 1), a=nn.GRU(4, 4, 2, dropout=0.4)
    ),
    "lstm": lambda: Part(
        lambda m, h: m.a(h)[0], a=nn.LSTM(4, 2, batch_first=True, bidirectional=True)
    ),
    "packed": lambda: Part(packed, a=nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "attention": lambda: Part(
        lambda m, h: m.a(h, h, h)[0], a=nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)
    ),
    "fused attention": lambda: Part(fused, a=linear(3 * WIDTH)),
    "dropout": lambda: Part(lambda m, h: m.b(m.a(h)), a=linear(), b=nn.Dropout(0.3, inplace=True)),
    "alpha dropout": lambda: Part(lambda m, h: m.b(m.a(h)), a=linear(), b=nn.AlphaDropout(0.3)),
    "twice": lambda: Part(lambda m, h: m.a(m.a(h).tanh()), a=linear()),
    "tied": lambda: Part(lambda m, h: F.linear(F.linear(h, m.w).tanh(), m.w.T), w=weight(4, 4)),
    "slices": lambda: Part(
        lambda m, h: F.linear(h, m.w[:4]) * F.linear(h, m.w[2:6]) + m.w[0], w=weight(7, WIDTH)
    ),
    "expanded": lambda: Part(lambda m, h: h * m.w + F.linear(h, m.w.expand(4, 4)), w=weight(1)),
    "unfolded": lambda: Part(lambda m, h: F.linear(h, m.w.unfold(0, 4, 1)), w=weight(7)),
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "checkpoint": lambda: Part(
        checkpointed(use_reentrant=False), a=linear(), b=linear(), drop=nn.Dropout(0.3)
    ),
    "checkpoint without streams": lambda: Part(
        checkpointed(use_reentrant=False, preserve_rng_state=False),
        a=linear(),
        b=linear(),
        drop=nn.Identity(),
    ),
    "reversed more and more": lambda: Part(
        lambda m, h: Reversed.apply(m.a(h), 0.2 * m.calls), a=linear()
    ),
    "no gradient to one output": lambda: Part(
        lambda m, h: (lambda z, positive: z + positive)(*WithSigns.apply(h, m.w)), w=weight(WIDTH)
    ),
    "hooks on gradients": lambda: Part(hooked, a=linear()),
    "hooks on modules": lambda: Part(lambda m, h: m.b(m.a(h)), a=linear(), b=shrunk(linear())),
    "in place": lambda: Part(in_place, a=linear(), w=weight(WIDTH)),
    "moving mean": lambda: Part(moving, a=linear(), mean=torch.zeros(WIDTH)),
    "moving mean, bound anew": lambda: Part(moving_anew, a=linear(), mean=torch.zeros(WIDTH)),
    "torch's numbers": lambda: Part(
        lambda m, h: m.a(h) * (1 + torch.rand(len(h), 1, 1, dtype=h.dtype)), a=linear()
    ),
    "numpy's numbers": lambda: Part(lambda m, h: m.a(h) * numpy.random.normal(), a=linear()),
    "python's numbers": lambda: Part(
        lambda m, h: m.a(h) if random.random() < 0.5 else m.a(h.sin()), a=linear()
    ),
    "layers left out": lambda: Part(
        lambda m, h: h if m.training and torch.rand(()) < 0.5 else m.a(h), a=linear()
    ),
    "branch": lambda: Part(lambda m, h: m.a(h) if h.sum() > 0 else m.b(h), a=linear(), b=linear()),
    "reached by some shards": lambda: Part(
        lambda m, h: m.a(h) + (m.w * h if len(h) == 2 else 0), a=linear(), w=weight(WIDTH)
    ),
    "unreached and empty": lambda: Part(
        lambda m, h: m.a(h) + m.w.sum(), a=linear(), w=weight(0, 3), u=weight(2)
    ),
    "frozen": lambda: linear().requires_grad_(False),
    "remembered": lambda: Part(remembered, a=linear()),
    "vmap": lambda: Part(
        lambda m, h: torch.func.vmap(lambda x: (x @ m.w).sin())(h), w=weight(4, 4)
    ),
    "function transforms": lambda: Part(
        lambda m, h: torch.func.vmap(torch.func.grad(lambda x: (x @ m.w).sin().sum()))(h),
        w=weight(4, 4),
    ),
    "called with others": lambda: Part(
        lambda m, h: torch.func.functional_call(
            m.a, {name: p.sin() for name, p in m.a.named_parameters()}, (h,)
        ),
        a=linear(),
    ),
    "differentiated inside": lambda: Part(relaxed, w=weight(4, 4)),
    "no grad": lambda: Part(without_grad, a=linear(), b=linear()),
    "inference": lambda: Part(inferred, a=linear(), b=linear()),
    "detached": lambda: Part(lambda m, h: m.a(h) * m.a(h).detach(), a=linear()),
    "embedding": lambda: Part(lambda m, h: h + m.e(signs(h)), e=nn.Embedding(3, 4, padding_idx=0)),
    "sparse embedding": lambda: Part(
        lambda m, h: h + m.e(signs(h)), e=nn.Embedding(3, 4, sparse=True)
    ),
    "bag": lambda: Part(lambda m, h: h + m.e(signs(h))[:, None], e=nn.EmbeddingBag(3, 4)),
    "lists": lambda: Part(
        lambda m, h: (h * m.p[0]) @ m.p[1], p=nn.ParameterList([weight(4), weight(4, 4)])
    ),
}
COUPLED: Final = frozenset({"batch norm", "averaging batch norm"})


class DrawnModules(nn.Module):
    """x (b, t, WIDTH) → (b, NUM_OUTPUTS), in float64."""

    def __init__(self, seed: int, *, without: frozenset[str] = frozenset()) -> None:
        super().__init__()
        of = random.Random(seed)
        self.names = of.choices(sorted(PARTS.keys() - without), k=of.randint(1, 4))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.parts = nn.Sequential(*(PARTS[name]() for name in self.names))
            self.head = linear(NUM_OUTPUTS)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.head(self.parts(x).mean(1))
        return z


def drawn_shards(seed: int, *, num_shards: int) -> list[dict[str, Tensor]]:
    """Return shards of 1 to 3 samples, all of one length."""
    of, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    length = of.randint(2, 4)
    sizes = [of.randint(1, 3) for _ in range(num_shards)]
    return [
        {"x": torch.randn(n, length, WIDTH, dtype=torch.float64, generator=numbers)} for n in sizes
    ]
