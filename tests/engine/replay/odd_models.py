"""Models that read buffers, keep tensors, differentiate inside or look up rows in odd ways.

What later shards overwrite, what a model leaves behind and what it does without a graph must not
show in the gradient, whatever graphs are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Shard = dict[str, Tensor]


@dataclass(frozen=True)
class Odd:
    """A model and its shards; `plain` is what naive code can differentiate in its place."""

    model: Callable[[], nn.Module]
    shards: Callable[[], list[Shard]]
    plain: Callable[[], nn.Module] | None = None


def rows() -> list[Shard]:
    generator = torch.Generator().manual_seed(4)
    return [{"0": torch.randn(3, 5, generator=generator, dtype=torch.float64)} for _ in range(6)]


def ids() -> list[Shard]:
    """Some come again in the same shard, some in others, and many are padding."""
    generator = torch.Generator().manual_seed(1)
    return [{"0": torch.randint(0, 12, (n, 6), generator=generator)} for n in (3, 3, 2, 5)]


class Norm(nn.Module):
    """A linear layer and its statistics, with two more buffers and a plain tensor."""

    average: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.second, self.third = nn.Linear(4, 3), nn.Linear(4, 2)
        self.register_buffer("average", torch.ones(4))
        self.register_buffer("scale", torch.ones(4))
        self.double()
        self.plain = torch.ones(4, dtype=torch.float64)
        self.part = self.average[:2]
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))

    def averaged(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.average.mul_(0.5).add_(h.detach().abs().mean(0))
        return h


# --- what graphs read, and later shards overwrite ------------------------------------------------


class _Reading(Norm):
    def forward(self, x: Tensor) -> Tensor:
        shift = self.norm.running_mean.clone()
        return super().forward(x) * (1 + shift)


class _ReadingUnseen(Norm):
    """Reads in a factor of its graph, which z hides."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        hidden = self.linear(x) * self.norm.running_mean
        return z + (hidden - hidden.detach())


class _ReadingEarly(Norm):
    """Reads before its batch norm overwrites, as autograd does not notice."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x) * self.norm.running_var
        return z + super().forward(x)


class _Average(Norm):
    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        self.average.mul_(0.9).add_(0.1 * z.detach().mean(0))
        return z + self.average


class _AverageUnseen(_ReadingUnseen, _Average):
    """Both."""


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale.clone())
        return z.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


class _LateScale(Norm):
    """A buffer changes from some call on, and shows in gradients alone."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        if self.norm.num_batches_tracked > 3:
            self.scale.mul_(0.5)
        return _Scaled.apply(z, self.scale)  # type: ignore[no-any-return]


def _late(first: int) -> type[Norm]:
    class Late(Norm):
        """A buffer changes from call `first` on, unseen by version counters."""

        def forward(self, x: Tensor) -> Tensor:
            if int(self.norm.num_batches_tracked) >= first:
                self.scale.data.mul_(0.5)
            return super().forward(x) * self.scale

    return Late


class _InPlaceThenAnew(Norm):
    """Writes into a buffer for two shards and binds its name to new tensors ever after."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x) * self.scale.sin()
        if self.norm.num_batches_tracked < 3:
            self.scale.data.mul_(1.5)
        else:
            self.scale = self.scale * 0.7
        return z + (self.linear(x) * self.scale).cos()


def _halved(name: str) -> type[Norm]:
    class Halved(Norm):
        """Scales by a tensor bound anew, with the numbers that the one before had."""

        def forward(self, x: Tensor) -> Tensor:
            getattr(self, name).data.mul_(0.5)  # which the graph of the shard before has saved
            setattr(self, name, getattr(self, name) * 1.0)
            return super().forward(x) * getattr(self, name)

    return Halved


class _ThroughAView(Norm):
    """Writes into a buffer through a view of it that is a plain attribute."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        self.part.add_(z.detach().sum(0)[:2])
        return z * self.average.clone().cos()


class _Checkpointed(Norm):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(  # type: ignore[no-any-return]
            lambda h: self.second((h * self.average).tanh()),
            self.averaged(x),
            use_reentrant=self.reentrant,
        )


class _Reentrant(_Checkpointed):
    reentrant = True


class _Scale(torch.autograd.Function):
    """Keeps the factor itself, unseen by hooks on saved tensors."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return h * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class _ByHand(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(_Scale.apply(self.averaged(x), self.average).tanh())


class _LateByHand(_ByHand):
    """Its average moves in some shards alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x[0, 0] > 0 else self.second(self.linear(x))


class _Rewriting(Norm):
    """Writes the same numbers to a buffer in each call, as caches of positions are written."""

    def forward(self, x: Tensor) -> Tensor:
        self.average.copy_(torch.arange(1.0, 5.0))
        return self.second((self.linear(x) * self.average).tanh())


def _edges(edges: Tensor) -> Callable[[], nn.Module]:
    class Graph(nn.Module):
        """Passes features along the edges of a graph, which are no plain dense buffer."""

        edges: Tensor

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(5, 4).double()
            self.register_buffer("edges", edges.clone() if edges.layout != torch.strided else edges)

        def forward(self, x: Tensor) -> Tensor:
            edges = self.edges
            return self.linear(x * edges if edges.ndim == 1 else (edges @ x.T).T).tanh()

    return Graph


# --- what a model does without a graph, or keeps with one -----------------------------------------


class _Otherwise(Norm):
    """Rounds otherwise without a graph."""

    def forward(self, x: Tensor) -> Tensor:
        z = F.dropout(super().forward(x), 0.3)
        return z if torch.is_grad_enabled() else z * (1 + 1e-15)


class _Refusing(Norm):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise RuntimeError("expected a graph")
        return super().forward(x)


class _OtherBuffers(Norm):
    """Without a graph z is the same, and the statistics are not."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        if not torch.is_grad_enabled():
            self.norm.running_mean.mul_(1 + 1e-15)  # type: ignore[union-attr]
        return z


class _OfAnotherForm(Norm):
    """Returns z alone where there is a graph, and a pair without."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        return z if torch.is_grad_enabled() else (z, None)  # type: ignore[return-value]


class _Fusing(Norm):
    """Fuses weights in its first call, by an operation that saves nothing for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        fused = self.cache.get("fused", self.kept)
        if fused is None:
            fused = torch.cat([self.second.weight, self.third.weight])
            self.keep(fused)
        return F.linear(super().forward(x), fused).tanh()

    def keep(self, fused: Tensor) -> None:
        self.kept = fused


class _FusingInADict(_Fusing):
    def keep(self, fused: Tensor) -> None:
        self.cache["fused"] = fused


# --- what checkpoints or differentiates inside ----------------------------------------------------


class Blocks(nn.Module):
    """Two checkpointed blocks, with dropout, around one weight that is also used outside."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.shared = nn.Linear(5, 5).double()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.4), nn.Tanh(), self.shared).double()
            for _ in range(2)
        )
        self.leaf = torch.ones(5, dtype=torch.float64, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x) * self.leaf
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class _Forces(nn.Module):
    """−∂energy/∂positions, with dropout in the energy and a mean of what it has seen."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.energy = nn.Sequential(
            nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)
        ).double()
        self.register_buffer("mean", torch.zeros(5).double())

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return -self.gradient((x - self.mean).detach().requires_grad_())

    def gradient(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class ByAutograd(_Forces):
    def gradient(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


class AskingNobody(_Forces):
    """Fails where nobody lets it have a graph."""

    def gradient(self, x: Tensor) -> Tensor:
        return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


class ByBackward(_Forces):
    """Leaves gradients everywhere."""

    def gradient(self, x: Tensor) -> Tensor:
        self.energy(x).sum().backward(create_graph=True)
        assert x.grad is not None
        return x.grad


class ByFunc(_Forces):
    def gradient(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: self.energy(x).sum())(x)


# --- tables of rows -------------------------------------------------------------------------------

NUM_ROWS, WIDTH = 64, 16


class Tables(nn.Module):
    """Three tables, each looked up in its own way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(NUM_ROWS, WIDTH, padding_idx=0)
        self.others = nn.Embedding(NUM_ROWS, WIDTH)
        self.places = nn.Embedding(16, WIDTH)
        self.mix = nn.Linear(WIDTH, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        found = F.dropout(self.words(x) * self.others(x + 1), 0.3, self.training)
        return self.mix(found + self.places(torch.arange(x.shape[1]))).tanh().sum(1)


class _Twice(Tables):
    """One table, looked up twice, and once as a matrix."""

    def forward(self, x: Tensor) -> Tensor:
        found = F.dropout(self.words(x) + self.words(x.flip(1)).sin(), 0.3, self.training)
        logits = F.linear(found, self.words.weight)
        return (logits.logsumexp(-1, keepdim=True) * self.mix(found)).sum(1)


def _tables(change: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        tables = Tables()
        change(tables)
        return tables

    return model


def _masked(gradient: Tensor) -> Tensor:
    """Half of a table is not to be trained."""
    assert not gradient.is_sparse
    return gradient * (torch.arange(len(gradient)) % 2).to(gradient)[:, None]


class _CheckpointedTables(Tables):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class _ReentrantTables(Tables):
    def forward(self, x: Tensor) -> Tensor:
        start = torch.zeros((), dtype=torch.float64, requires_grad=True)
        return checkpoint(  # type: ignore[no-any-return]
            lambda s: Tables.forward(self, x) + s, start, use_reentrant=True
        )


class _Squared(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight.square(), self.padding_idx)


class _Tripled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


def _replaced(kind: type[nn.Embedding]) -> Callable[[], nn.Module]:
    return _tables(lambda m: setattr(m, "words", kind(NUM_ROWS, WIDTH, padding_idx=0).double()))


class _Inner(Tables):
    """The norm of the table's gradient is part of the output, as adversarial training has it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = super().forward(x)
            (gradient,) = torch.autograd.grad(z.sum(), self.words.weight, create_graph=True)
            return z + gradient.norm()


_RING = torch.eye(5, dtype=torch.float64).roll(1, 0) + torch.eye(5, dtype=torch.float64)

ODD: dict[str, Odd] = {
    **{
        kind.__name__.strip("_"): Odd(kind, rows)
        for kind in (
            Norm, _Reading, _ReadingUnseen, _ReadingEarly, _Average, _AverageUnseen, _LateScale,
            _InPlaceThenAnew, _ThroughAView, _Checkpointed, _Reentrant, _ByHand, _LateByHand,
            _Rewriting, _Otherwise, _Refusing, _OtherBuffers, _OfAnotherForm, _Fusing,
            _FusingInADict, ByAutograd, AskingNobody, ByFunc,
        )
    },
    **{f"late from call {first}": Odd(_late(first), rows) for first in (0, 1, 3, 5)},
    **{f"halved {name}": Odd(_halved(name), rows) for name in ("scale", "plain")},
    "ByBackward": Odd(ByBackward, rows, plain=ByAutograd),
    "edges, coo": Odd(_edges(_RING.to_sparse()), rows),
    "edges, csr": Odd(_edges(_RING.to_sparse_csr()), rows),
    "edges, expanded": Odd(_edges(torch.full((1,), 0.5, dtype=torch.float64).expand(5)), rows),
    "blocks": Odd(lambda: Blocks(reentrant=False), rows),
    "reentrant blocks": Odd(lambda: Blocks(reentrant=True), rows),
    **{
        f"tables, {name}": Odd(model, ids)
        for name, model in {
            "three": Tables,
            "one twice": _Twice,
            "one under two names": _tables(lambda m: setattr(m.others, "weight", m.words.weight)),
            "counting": _tables(lambda m: setattr(m.words, "scale_grad_by_freq", True)),
            "hooked": _tables(lambda m: m.words.weight.register_hook(_masked)),
            "sparse": _tables(lambda m: setattr(m.words, "sparse", True)),
            "checkpointed": _CheckpointedTables,
            "checkpointed, reentrant": _ReentrantTables,
            "a forward of its own": _replaced(_Squared),
            "scaled on the way out": _replaced(_Tripled),
            "differentiated inside": _Inner,
        }.items()
    },
}  # fmt: skip
