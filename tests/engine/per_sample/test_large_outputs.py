"""Reductions over a large output layer: by the way that multiplies less, without a second copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradbox_engine.per_sample import CoupledSamples, per_sample_gradient
from gradbox_factors import Factored, Outer, Positions, Sketch, gram, outer
from gradbox_factors.multiplications import (
    Sizes,
    gram_is_of_pairs,
    norm_is_of_pairs,
    sketch_is_of_factors,
    weights_go_right,
)
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written

DOUBLE = torch.float64
CLASSES, T = 200, 6
COUNTS = (3, 4, 4, 2)  # samples of each shard
WIDTHS = (4, 40)  # of which norms are made from rows, and from pairs of positions

REDUCTIONS: list[dict[str, Any]] = [
    {"reduce": "norm"},
    {"reduce": "gram"},
    {"reduce": "clipped_sum", "clip": 3.0},
    {"reduce": "projection", "dim": 8},
]


def model(width: int, *, transposed: bool = False) -> nn.Module:
    torch.manual_seed(0)
    if not transposed:
        head = nn.Linear(width, CLASSES)
        return nn.Sequential(nn.Embedding(9, width), nn.Tanh(), head).to(DOUBLE)

    def forward(m: Any, ids: Tensor) -> Tensor:
        z: Tensor = m.a(ids).tanh() @ m.weight
        return z

    weight = nn.Parameter(torch.randn(width, CLASSES))
    return Written(forward, a=nn.Embedding(9, width), weight=weight).to(DOUBLE)


def data() -> tuple[list[dict[str, Tensor]], Tensor]:
    numbers = torch.Generator().manual_seed(1)
    ids = torch.randint(9, (sum(COUNTS), T), generator=numbers)
    targets = torch.randint(CLASSES, ids.shape, generator=numbers)
    return [{"0": some} for some in torch.split(ids, COUNTS)], targets


def loss(z: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(z.transpose(1, 2), targets, reduction="none").sum(1)


def looped_rows(net: nn.Module) -> dict[str, Tensor]:
    """Return the rows by a loop over samples, each called alone."""
    shards, targets = data()
    parameters = dict(net.named_parameters())
    rows = [
        torch.autograd.grad(loss(net(one[None]), y[None])[0], list(parameters.values()))
        for one, y in zip(torch.cat([shard["0"] for shard in shards]), targets, strict=True)
    ]
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(parameters)}


def called(net: nn.Module, **how: Any) -> Any:
    shards, targets = data()
    return per_sample_gradient(net, shards, loss, loss_inputs={"targets": targets}, **how)


def projected(rows: dict[str, Tensor], dim: int) -> Tensor:
    total = torch.zeros(sum(COUNTS), dim, dtype=DOUBLE)
    for name, row in rows.items():
        matrix = row.flatten(2) if row.dim() > 2 else row[..., None]
        bucket, sign = Sketch(dim).grid(
            name, 0, matrix.shape[1], matrix.shape[2], device=row.device
        )
        total.index_add_(1, bucket.flatten(), (matrix * sign).flatten(1))
    return total


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("how", REDUCTIONS, ids=lambda how: how["reduce"])
def test_a_reduction_is_that_of_a_loop_over_samples(
    how: dict[str, Any], width: int, transposed: bool
) -> None:
    net = model(width, transposed=transposed)
    rows = looped_rows(net)
    flat = naive.flat(rows, 1)
    found = called(net, **how).arrays
    if how["reduce"] == "norm":
        expected = {"norm": flat.norm(dim=1)}
    elif how["reduce"] == "gram":
        expected = {"gram": flat @ flat.T}
    elif how["reduce"] == "projection":
        expected = {"projection": projected(rows, how["dim"])}
    else:
        weights = how["clip"] / flat.norm(dim=1).clamp_min(how["clip"])
        expected = {name: torch.tensordot(weights, row, 1) for name, row in rows.items()}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert naive.difference(found[name], array) <= naive.TOLERANCE, name


def large(width: int, samples: int = 8) -> Sizes:
    return Sizes(outputs=1, samples=samples, positions=64, rows=50_000, columns=width)


def test_the_way_that_multiplies_less_is_taken_at_the_sizes_that_are_written_down() -> None:
    assert not norm_is_of_pairs(large(32))
    assert norm_is_of_pairs(large(256))
    for width in (32, 256):
        assert not gram_is_of_pairs([large(width)] * 2, None)
        assert sketch_is_of_factors(large(width), 512)
        assert weights_go_right(large(width))
    # Two pieces would be dearer from rows, were these made again for every pair of pieces.
    assert gram_is_of_pairs([large(256, 1)], [large(256, 1)])
    assert not gram_is_of_pairs([large(256, 1)] * 16, [large(256, 1)] * 16)
    assert not sketch_is_of_factors(Sizes(1, 8, 64, 32, 32), 512)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("first", [True, False])
def test_both_ways_give_the_same_numbers(
    first: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("norm_is_of_pairs", "sketch_is_of_factors", "weights_go_right"):
        monkeypatch.setattr(outer, name, lambda *_: first)
    monkeypatch.setattr(gram, "gram_is_of_pairs", lambda *_: first)
    numbers = torch.Generator().manual_seed(0)

    def piece(B: int) -> dict[str, Any]:
        left = torch.randn(1, B, 3, 20, dtype=DOUBLE, generator=numbers)
        right = torch.randn(B, 3, 5, dtype=DOUBLE, generator=numbers)
        shape = (5, 20) if transposed else (20, 5)
        return {"w": Outer("w", shape, left, right, transposed), "b": Positions("b", (20,), left)}

    factors = Factored([piece(2), piece(3)])
    rows = torch.cat([factors.block(name).flatten(1) for name in factors.names], 1)
    weights = torch.arange(1.0, 6.0, dtype=DOUBLE)
    pulled = factors.vjp(weights[:, None])
    grid = [Sketch(8).grid(n, 0, *s, device=rows.device) for n, s in shapes(factors).items()]
    bucket, sign = (torch.cat([part[i].flatten() for part in grid]) for i in (0, 1))
    sketched = torch.zeros(5, 8, dtype=DOUBLE).index_add_(1, bucket, rows * sign)
    for found, expected in [
        (factors.norms()[:, 0], rows.norm(dim=1)),
        (factors.gram()[:, 0, :, 0], rows @ rows.T),
        (factors.gram(trace=True), rows @ rows.T),
        (torch.cat([x.flatten() for x in pulled.values()]), weights @ rows),
        (factors.projection(8)[:, 0], sketched),
    ]:
        assert naive.difference(found, expected) <= naive.TOLERANCE


def shapes(factors: Factored) -> dict[str, tuple[int, int]]:
    """Return each parameter's rows and columns."""
    terms = factors.pieces[0]
    return {n: (t.shape[0], t.shape[1] if len(t.shape) > 1 else 1) for n, t in terms.items()}


class MadeTensors(TorchDispatchMode):
    """Counts the tensors of some bytes or more that are made, views apart."""

    def __init__(self, least_bytes: int) -> None:
        super().__init__()
        self.count, self._least_bytes = 0, least_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
        self.count += sum(
            x.nbytes >= self._least_bytes and x.untyped_storage().data_ptr() not in given
            for x in tensors(out)
        )
        return out


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


@pytest.mark.parametrize("how", REDUCTIONS, ids=lambda how: how["reduce"])
def test_a_further_shard_makes_no_more_of_the_size_of_its_outputs_than_the_plain_step(
    how: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    classes, width, B = 20_000, 4, 4
    net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, classes))
    xs, targets = torch.randn(3 * B, 16, 3), torch.randint(classes, (3 * B, 16))
    logits_bytes = B * 16 * classes * 4

    def mean(z: Tensor, targets: Tensor) -> Tensor:
        flat = F.cross_entropy(z.flatten(0, 1), targets.flatten(), reduction="none")
        return flat.view(targets.shape).sum(1)

    def made(run: Callable[[], Any]) -> int:
        with MadeTensors(logits_bytes) as seen:
            run()
        return seen.count

    def job(shards: int) -> Callable[[], Any]:
        inputs = [{"0": some} for some in torch.split(xs, B)[:shards]]
        given = {"targets": targets[: shards * B]}
        return lambda: per_sample_gradient(net, inputs, mean, loss_inputs=given, **how)

    def plain() -> None:
        torch.autograd.grad(mean(net(xs[:B]), targets[:B]).sum(), list(net.parameters()))

    job(1)()  # makes the plan
    assert made(job(3)) - made(job(2)) == made(plain)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "that counts its samples": lambda z: z.square().sum(1) / len(z),
    "made for so many samples": lambda z: z.view(6, 2).square().sum(1),
    "of zero for some": lambda z: z.square().sum(1) * torch.arange(6).eq(0)[: len(z)],
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_another_for_one_sample_alone_is_taken(name: str) -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(3, 2).double(), torch.randn(6, 3, dtype=DOUBLE)
    found = per_sample_gradient(net, [{"0": x}], LOSSES[name]).arrays
    expected = naive.rows(LOSSES[name](net(x))[:, None], dict(net.named_parameters()))
    assert naive.difference(naive.flat(found, 1), naive.flat(expected)[:, 0]) <= naive.TOLERANCE


def test_a_loss_that_couples_the_samples_of_a_later_shard_without_a_derivative_is_refused() -> None:
    net, x = nn.Linear(3, 2), torch.randn(12, 3)
    later = torch.arange(12).ge(6).float()
    with pytest.raises(CoupledSamples, match="loss"):
        per_sample_gradient(
            net,
            [{"0": x[:6]}, {"0": x[6:]}],
            lambda z, later: z.square().sum(1) + later * z.detach().mean(),
            loss_inputs={"later": later},
        )
