"""Models that use parameters in every way a rule or a road is for, each with one batch of inputs.

All in float64, B samples on dim 0 of the output. `AXIS` cases put the samples elsewhere inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.device import DEVICE, moved

B = 5
Case = tuple[nn.Module, dict[str, Tensor]]


class Written(nn.Module):
    """A model given by its forward function and its parts."""

    def __init__(
        self, forward: Callable[..., Tensor], /, **parts: nn.Module | nn.Parameter
    ) -> None:
        super().__init__()
        self._function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Call the function with this module first."""
        return self._function(self, *args, **kwargs)


class Square(torch.autograd.Function):
    """x w², which no function override sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w * w, (g * 2 * x * w).sum(0)


def _p(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.5)


def _x(*shape: int) -> dict[str, Tensor]:
    return {"0": torch.randn(B, *shape)}


def _ids(*shape: int) -> Tensor:
    return torch.randint(0, 11, (B, *shape))


def _convolution(dims: int, **how: Any) -> Case:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return _imaged(kind(4, 6, **how), dims)


def _transposed(dims: int, **how: Any) -> Case:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    return _imaged(kind(4, 6, **how), dims)


def _imaged(layer: nn.Module, dims: int) -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.a(x).flatten(1)[:, :: (5, 13, 149)[dims - 1]].tanh()

    return Written(forward, a=layer), _x(4, *(7, 6, 5)[:dims])


def _recurrent(kind: type[nn.Module]) -> Case:
    layer = kind(4, 3, num_layers=2, bidirectional=True, batch_first=True)
    return Written(lambda m, x: m.a(x)[0][:, -1], a=layer), _x(6, 4)


def _packed(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    lengths = lengths.cpu()
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    h: Tensor = m.a(packed)[1][0][-1]
    return h


def _bare(m: Any, x: Tensor) -> Tensor:
    tokens = torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.table
    pooled: Tensor = tokens[:, :2].mul(m.scale).sum(1) * m.gain + m.shift
    return pooled


def _checkpointed() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        inner = checkpoint(lambda y: (m.n(m.a(y)) * m.g).tanh(), x * m.q, use_reentrant=False)
        out: Tensor = m.b(inner)
        return out

    parts = {"a": nn.Linear(4, 3), "n": nn.LayerNorm(3), "b": nn.Linear(3, 2)}
    return Written(forward, **parts, g=_p(3), q=_p(4)), _x(4)


def _normalised() -> Case:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.InstanceNorm2d(4, affine=True),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    return model, _x(2, 6, 6)


def _attention(inputs: Mapping[str, Tensor], **how: Any) -> Case:
    layer = nn.MultiheadAttention(8, 2, **{"batch_first": True, **how})
    model = Written(lambda m, x, y: m.a(x, y, y)[0].mean(1), a=layer)
    return model, dict(inputs)


CASES: dict[str, Callable[[], Case]] = {
    "linear": lambda: (nn.Linear(4, 3), _x(4)),
    "linear over positions": lambda: (
        Written(lambda m, x: m.a(x).mean((1, 2)), a=nn.Linear(4, 3)),
        _x(2, 6, 4),
    ),
    **{
        f"{name}, {dims}d": (lambda make=make, dims=dims, how=how: make(dims, **how))
        for dims in (1, 2, 3)
        for name, make, how in (
            ("convolution", _convolution, {"kernel_size": 3, "stride": 2, "padding": 1}),
            (
                "dilated grouped convolution",
                _convolution,
                {"kernel_size": 2, "padding": 2, "dilation": 2, "groups": 2},
            ),
            ("same padding", _convolution, {"kernel_size": 2, "padding": "same"}),
            (
                "transposed convolution",
                _transposed,
                {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
            ),
            (
                "grouped transposed convolution",
                _transposed,
                {"kernel_size": 3, "stride": 2, "padding": 1, "groups": 2, "dilation": 2},
            ),
            (
                "transposed convolution padded by more than a stride",
                _transposed,
                {"kernel_size": 3, "padding": 2, "dilation": 3, "output_padding": 2},
            ),
        )
    },
    "depthwise": lambda: (
        Written(lambda m, x: m.a(x).mean((2, 3)), a=nn.Conv2d(4, 8, 3, groups=4)),
        _x(4, 6, 6),
    ),
    "embedding with padding": lambda: (
        Written(lambda m, x: m.a(x).tanh().sum(1), a=nn.Embedding(11, 4, padding_idx=0)),
        {"0": _ids(6)},
    ),
    "sparse embedding": lambda: (
        Written(lambda m, x: m.a(x).tanh().sum(1), a=nn.Embedding(11, 4, sparse=True)),
        {"0": _ids(6)},
    ),
    "embedding twice and tied": lambda: (
        Written(
            lambda m, x, y: F.linear((m.a(x).sum(1) + m.a(y).mean(1)).tanh(), m.a.weight),
            a=nn.Embedding(11, 4),
        ),
        {"x": _ids(6), "y": _ids(3)},
    ),
    "embedding bag": lambda: (nn.EmbeddingBag(11, 4), {"0": _ids(6)}),
    "layer norm": lambda: (
        Written(lambda m, x: m.b(m.a(x)).sum(1), a=nn.LayerNorm((3, 4)), b=nn.Linear(4, 2)),
        _x(3, 4),
    ),
    "rms norm": lambda: (
        Written(lambda m, x: m.b(m.a(x)).sum(1), a=nn.RMSNorm(4), b=nn.Linear(4, 2)),
        _x(3, 4),
    ),
    "group, instance and batch norm": _normalised,
    "instance norm with statistics": lambda: (
        nn.Sequential(
            nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
            nn.Flatten(),
            nn.Linear(72, 3),
        ),
        _x(2, 6, 6),
    ),
    "attention": lambda: _attention({"0": torch.randn(B, 4, 8), "1": torch.randn(B, 6, 8)}),
    "attention with bias_kv": lambda: _attention(
        {"0": torch.randn(B, 4, 8), "1": torch.randn(B, 6, 8)}, add_bias_kv=True
    ),
    "attention with kdim": lambda: _attention(
        {"0": torch.randn(B, 4, 8), "1": torch.randn(B, 6, 6)}, kdim=6, vdim=6
    ),
    "encoder layer": lambda: (
        Written(
            lambda m, x: m.a(x).mean(1), a=nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        ),
        _x(5, 8),
    ),
    "lstm": lambda: _recurrent(nn.LSTM),
    "gru": lambda: _recurrent(nn.GRU),
    "rnn": lambda: _recurrent(nn.RNN),
    "projected lstm, samples on dim 1": lambda: (
        Written(lambda m, x: m.a(x)[1][0][-1], a=nn.LSTM(4, 5, proj_size=3)),
        {"0": torch.randn(7, B, 4)},
    ),
    "lstm cell": lambda: (Written(lambda m, x: m.a(x)[1], a=nn.LSTMCell(4, 5)), _x(4)),
    "gru cell": lambda: (Written(lambda m, x: m.a(x), a=nn.GRUCell(4, 5)), _x(4)),
    "packed lstm": lambda: (
        Written(_packed, a=nn.LSTM(4, 5, batch_first=True)),
        {**_x(6, 4), "1": torch.tensor([6, 5, 4, 3, 2])},
    ),
    "bare parameters": lambda: (
        Written(_bare, token=_p(1, 1, 4), table=_p(1, 4, 4), scale=_p(4), gain=_p(), shift=_p(4)),
        _x(3, 4),
    ),
    "bare parameters on the left": lambda: (
        Written(
            lambda m, x: (1 - m.a) * x / m.b + torch.where(x > 0, m.c, m.a) - m.d**2,
            a=_p(4), b=_p(4), c=_p(4), d=_p(4),
        ),
        _x(4),
    ),
    "products": lambda: (
        Written(
            lambda m, x: torch.addmm(m.b, (x @ m.a).sum(1), m.c) @ m.d.t(),
            a=_p(4, 3), b=_p(5), c=_p(3, 5), d=_p(2, 5),
        ),
        _x(3, 4),
    ),
    "einsum, one output": lambda: (
        Written(lambda m, x: torch.einsum("bti,ij->bj", x, m.a) @ m.b, a=_p(4, 3), b=_p(3)),
        _x(3, 4),
    ),
    "prelu and bilinear": lambda: (
        Written(lambda m, x: m.b(m.a(x), x), a=nn.PReLU(4), b=nn.Bilinear(4, 4, 3)),
        _x(4),
    ),
    "weight norm": lambda: (Written(lambda m, x: m.a(x), a=weight_norm(nn.Linear(4, 3))), _x(4)),
    "sliced weights": lambda: (
        Written(
            lambda m, x: F.linear(x, m.w[:3], m.b[1:4]) + F.linear(x[:, :3], m.w.t()[:3, :3]),
            w=_p(6, 4), b=_p(6),
        ),
        _x(4),
    ),
    "relative positions": lambda: (
        Written(
            lambda m, x: (
                (x + m.t[torch.arange(3)[:, None] - torch.arange(3) + 2].permute(2, 0, 1))
                .flatten(1)
                .tanh()
            ),
            t=_p(5, 2),
        ),
        _x(2, 3, 3),
    ),
    "positions of batch 1": lambda: (
        Written(
            lambda m, x, p: m.l((m.a(x) + m.b(p)).tanh().sum(1)),
            a=nn.Embedding(11, 4), b=nn.Embedding(6, 4), l=nn.Linear(4, 2),
        ),
        {"x": _ids(6), "p": torch.arange(6)[None]},
    ),
    "samples on dim 1 inside, as many positions": lambda: (
        Written(
            lambda m, x: m.b(m.a(x.transpose(0, 1)).tanh()).transpose(0, 1).sum(1),
            a=nn.Linear(4, 3), b=nn.Linear(3, 2),
        ),
        _x(B, 4),
    ),
    "samples on dim 1 of the input, as many positions": lambda: (
        Written(
            lambda m, x: m.b(m.a(x).tanh()).sum(0), a=nn.Linear(4, 3), b=nn.Linear(3, 2)
        ),
        {"0": torch.randn(B, B, 4)},
    ),
    "samples merged with positions": lambda: (
        Written(
            lambda m, x: (
                m.b(m.a(x.reshape(-1, 4)).tanh() * m.g).view(len(x), -1, 2).sum(1)
            ),
            a=nn.Linear(4, 3), b=nn.Linear(3, 2), g=_p(3),
        ),
        _x(3, 4),
    ),
    "positions merged with samples": lambda: (
        Written(
            lambda m, x: (
                m.b(m.n(m.a(x.transpose(0, 1).reshape(-1, 4))).tanh() * m.g)
                .view(-1, len(x), 2)
                .sum(0)
            ),
            a=nn.Linear(4, 4), b=nn.Linear(4, 2), g=_p(4), n=nn.BatchNorm1d(4),
        ),
        _x(3, 4),
    ),
    "frames merged with samples": lambda: (
        Written(
            lambda m, x: m.a(x.flatten(0, 1)).view(len(x), -1).tanh()[:, ::5],
            a=nn.Conv2d(2, 3, 3),
        ),
        _x(3, 2, 5, 5),
    ),
    "checkpointing": _checkpointed,
    "unused layer": lambda: (
        Written(lambda m, x: m.a(x), a=nn.Linear(4, 3), b=nn.Linear(4, 3)),
        _x(4),
    ),
    "layer called twice": lambda: (
        Written(lambda m, x: m.a(m.a(x).tanh()), a=nn.Linear(4, 4)),
        _x(4),
    ),
    "convolution called twice": lambda: (
        Written(
            lambda m, x: m.a(m.a(x).tanh()).flatten(1)[:, ::4], a=nn.Conv2d(2, 2, 3, padding=1)
        ),
        _x(2, 4, 4),
    ),
    "in place after a layer": lambda: (
        Written(
            lambda m, x: m.b(m.a(x).mul_(2).add_(m.p).tanh()),
            a=nn.Linear(4, 3), b=nn.Linear(3, 3), p=_p(3),
        ),
        _x(4),
    ),
    "custom function": lambda: (
        Written(lambda m, x: Square.apply(m.a(x), m.w), a=nn.Linear(4, 3), w=_p(3)),
        _x(4),
    ),
    "branch on the data": lambda: (
        Written(
            lambda m, x, way: m.a(x) if way.all() else m.b(x),
            a=nn.Linear(4, 3), b=nn.Linear(4, 3),
        ),
        {**_x(4), "1": torch.full((B,), True)},
    ),
    "loop over samples": lambda: (
        Written(lambda m, x: torch.stack([m.a(row) for row in x]), a=nn.Linear(4, 3)),
        _x(4),
    ),
}  # fmt: skip

LOOPS = {
    "packed lstm": {"a.weight_ih_l0", "a.weight_hh_l0", "a.bias_ih_l0", "a.bias_hh_l0"},
    "checkpointing": {"g"},
    "custom function": {"w"},
    "loop over samples": {"a.weight", "a.bias"},
}
"""The parameters that take one backward pass a sample; all others have a rule or a road."""


def build(name: str) -> Case:
    """Return a case's model in eval mode and its inputs, in float64 on DEVICE."""
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    wide = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
    return model.double().eval().to(DEVICE), moved(wide)
