"""Embedding tables: padded, shared, tied, hooked, checkpointed, sparse, differentiated inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradbox_engine import (
    Group,
    ModelCallFailed,
    Objective,
    Penalty,
    set_gradient,
    shard_stream,
)
from tests.oracle import TOLERANCE, difference

PLENTY = 10**9
NUM_ROWS, WIDTH = 64, 16
NUM_SHARDS = 4


class _Tables(nn.Module):
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


class _Twice(_Tables):
    """One table, looked up twice, and once as a matrix."""

    def forward(self, x: Tensor) -> Tensor:
        found = F.dropout(self.words(x) + self.words(x.flip(1)).sin(), 0.3, self.training)
        logits = F.linear(found, self.words.weight)
        return (logits.logsumexp(-1, keepdim=True) * self.mix(found)).sum(1)


class _Shared(_Tables):
    """One table under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.others.weight = self.words.weight


class _Counting(_Tables):
    """Tables whose gradients are divided by how often a row came in a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.words.scale_grad_by_freq = True


class _Hooked(_Tables):
    """Half of a table is not to be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.words.weight.register_hook(self._masked)

    @staticmethod
    def _masked(gradient: Tensor) -> Tensor:
        assert not gradient.is_sparse
        return gradient * (torch.arange(len(gradient)) % 2).to(gradient)[:, None]


class _Sparse(_Tables):
    """A table whose gradient comes by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words.sparse = True


class _Checkpointed(_Tables):
    """Runs its forward pass once more in the backward pass."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


class _CheckpointedReentrant(_Checkpointed):
    use_reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        start = torch.zeros((), dtype=torch.float64, requires_grad=True)
        return checkpoint(lambda s: _Tables.forward(self, x) + s, start, use_reentrant=True)


class _Own(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight.square(), self.padding_idx)


class _OwnForward(_Tables):
    """A table with a forward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = _Own(NUM_ROWS, WIDTH, padding_idx=0).double()


class _Times(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


class _Scaled(_Tables):
    """A table whose rows are scaled on their way out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = _Times(NUM_ROWS, WIDTH, padding_idx=0).double()


class _Inner(_Tables):
    """The table's gradient is part of the output."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        (gradient,) = torch.autograd.grad(z.sum(), self.words.weight, create_graph=True)
        return z + gradient.square().sum()


MODELS = (
    _Tables,
    _Twice,
    _Shared,
    _Counting,
    _Hooked,
    _Sparse,
    _Checkpointed,
    _CheckpointedReentrant,
    _OwnForward,
    _Scaled,
    _Inner,
)


def _shards(num_tokens: int = 6) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    # Some rows come again in the same shard, some in others, and many are padding.
    sizes = (3, 3, 2, 5)[:NUM_SHARDS]
    return [{"0": torch.randint(0, 12, (n, num_tokens), generator=generator)} for n in sizes]


def _loss(z: Tensor) -> Tensor:
    z = F.normalize(z, dim=1)
    return (z @ z.T).exp().mean()


def _answer(model: nn.Module, **terms: Any) -> Any:
    told = {"mode": "train", "seed": 3} | terms
    return set_gradient(model, [Group("z", _shards())], Objective(_loss), **told)


def _naive(kind: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    model = kind().to(dtype).train()
    zs = []
    for i, shard in enumerate(_shards()):
        with shard_stream(3, 0, i):
            zs.append(model(shard["0"]))
    _loss(torch.cat(zs)).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("retain", [0, PLENTY])
@pytest.mark.parametrize("kind", MODELS)
def test_the_gradient_is_that_of_naive_code(kind, retain):
    model = kind()
    result = _answer(model, retain=retain)
    assert difference(result.grads, _naive(kind)) <= TOLERANCE
    assert not any(gradient.is_sparse for gradient in result.grads.values())


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_kept_does_not_show(kind):
    none, some, all_ = (_answer(kind().float(), retain=r).grads for r in (0, 20_000, "auto"))
    assert all(torch.equal(none[n], some[n]) and torch.equal(none[n], all_[n]) for n in none)


def test_padding_gets_no_gradient():
    gradient = _answer(_Tables()).grads["words.weight"]
    assert not gradient[0].any()
    assert gradient[1:12].any(1).all()
    assert not gradient[12:].any()


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 2e-6), ("bf16", 3e-2), ("fp16", 4e-3), ("fp64", 1e-10)]
)
def test_in_every_precision(precision, tolerance):
    def model() -> nn.Module:
        return _Tables().to(torch.float32)

    grads = _answer(model(), precision=precision).grads
    expected = _naive(lambda: model().double()) if precision == "fp64" else _naive(model)
    assert difference(grads, expected) <= tolerance


def test_weights_in_half_precision_have_wider_sums():
    grads = _answer(_Tables().to(torch.bfloat16)).grads
    assert grads["words.weight"].dtype == torch.float32
    assert difference(grads, _naive(lambda: _Tables().to(torch.bfloat16), torch.float32)) <= 5e-2


def test_penalties_reach_a_table():
    def loss(tap: Tensor) -> Tensor:
        return tap.square().sum()

    result = _answer(_Tables(), penalties=[Penalty(at="words", loss=loss, weight=0.1)])
    expected = _naive(_Tables)
    table = _Tables().words
    sum(0.1 * loss(table(shard["0"])) for shard in _shards()).backward()
    expected["words.weight"] = expected["words.weight"] + table.weight.grad
    assert difference(result.grads, expected) <= TOLERANCE


class _Adversarial(nn.Module):
    """Moves its table's rows along their own normalised gradient, as adversarial training does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(32, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.table.weight
        z = self.head(self.table(ids)).tanh().mean(1)
        (gradient,) = torch.autograd.grad(z.square().sum(), weight, create_graph=True)
        return z + gradient.norm()


def test_a_model_may_read_the_norm_of_its_tables_gradient():
    ids = torch.arange(24).reshape(8, 3)
    shards = [{"ids": rows} for rows in ids.split(2)]
    model, naive = _Adversarial(), _Adversarial()
    (torch.cat([naive(**shard) for shard in shards]) ** 2).mean().backward()
    expected = {name: p.grad for name, p in naive.named_parameters()}
    for retain in (0, 10**9, "auto"):
        objective = Objective(lambda z: (z**2).mean())
        result = set_gradient(model, [Group("z", shards)], objective, retain=retain)
        assert difference(result.grads, expected) <= 1e-5
    with pytest.raises(ModelCallFailed):
        set_gradient(model, [Group("z", [{"ids": ids.double()}])], Objective(torch.sum))


def test_gradients_of_a_loss_that_looks_up_sparsely_are_dense():
    torch.manual_seed(0)
    shards = [{"0": torch.randn(2, 5, dtype=torch.float64)} for _ in range(3)]
    model = nn.Linear(5, 4, dtype=torch.float64)
    table = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([4, 0, 4])

    def loss(z: Tensor, table: Tensor) -> Tensor:
        looked_up = z[rows] * F.embedding(rows, table, sparse=True)
        return looked_up.sin().sum()

    loss(torch.cat([model(shard["0"]) for shard in shards]), table).backward()
    naive = {"table": table.grad, **{name: p.grad for name, p in model.named_parameters()}}
    expected = {name: g.to_dense() for name, g in naive.items() if g is not None}
    objective = Objective(loss, {"table": table}, {"table": table})
    found = set_gradient(model, [Group("z", shards)], objective)
    assert {g.layout for g in found.grads.values()} == {torch.strided}
    assert difference(found.grads, expected) <= TOLERANCE
