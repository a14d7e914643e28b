"""Penalties on activations against naive code that adds them to the loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import BadPenalty, Group, LossNotFinite, Objective, Penalty, set_gradient
from gradbox_engine.model.calling.shard_rng import shard_stream
from tests.case_models import seeded
from tests.cases import CASES, Case, whitening
from tests.device import DEVICE, moved, same_bits
from tests.engine.memory import peak_bytes
from tests.engine.replay.running import answer
from tests.oracle import TOLERANCE, difference


def _square(tap: Tensor) -> Tensor:
    return tap.square().mean()


def _sparse(tap: Tensor) -> Tensor:
    return tap.abs().sum() / tap.norm()


def _scale(z: Tensor) -> Tensor:
    return z.flatten(1).sum(1).sigmoid() * 3


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tap: Tensor, scale_b: Tensor) -> Tensor:
        ctx.scale_b = scale_b
        return tap.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient * ctx.scale_b.view(-1, *[1] * (gradient.ndim - 1)), None


def _naive(case: Case, penalties: Sequence[Penalty]) -> tuple[float, dict[str, Tensor]]:
    """L + Σ weight · loss(tap), taps collected by hooks, one graph of everything."""
    model = case.model().to(DEVICE).train(case.mode == "train")
    zs, terms = [], []
    taps: list[tuple[Penalty, Tensor]] = []
    for penalty in penalties:
        name, _, element = penalty.at.removesuffix("]").partition("[")

        def hook(_module, _inputs, out, penalty=penalty, element=element):
            tap = out[int(element) if element.isdigit() else element] if element else out
            taps.append((penalty, tap.clone()))

        model.get_submodule(name).register_forward_hook(hook)
    for i, shard in enumerate(map(moved, case.groups["z"])):
        taps.clear()
        with shard_stream(case.seed, 0, i):
            places = [value for key, value in shard.items() if key.isdigit()]
            out = model(*places, **{k: v for k, v in shard.items() if not k.isdigit()})
        z = out[case.output] if case.output is not None else out
        zs.append(z if case.readout is None else case.readout(z, shard))
        for penalty, tap in taps:
            if penalty.per_sample_scale is not None:
                tap = _ScaledGradient.apply(tap, penalty.per_sample_scale(zs[-1].detach()))
            terms.append(penalty.weight * penalty.loss(tap))
    loss = case.loss(torch.cat(zs)) + sum(terms)
    loss.backward()
    zero = torch.zeros(())
    return loss.item(), {
        n: zero.expand(p.shape) if p.grad is None else p.grad
        for n, p in model.named_parameters()
        if p.is_floating_point()
    }


PENALTIES = {
    "one": ("mlp", [Penalty("0", _square, 0.3)]),
    "several on one path": (
        "mlp",
        [Penalty("0", _square, 0.3), Penalty("1", _sparse, 0.1), Penalty("3", _square, -2.0)],
    ),
    "two at one place": ("mlp", [Penalty("2", _square, 0.3), Penalty("2", _sparse, 1.5)]),
    "on z itself": ("mlp", [Penalty("", _square, 0.3)]),
    "scaled per sample": ("mlp", [Penalty("1", _square, 0.3, _scale)]),
    "scaled and not": ("mlp", [Penalty("1", _square, 0.3, _scale), Penalty("3", _square)]),
    "before an in-place activation": (
        "in-place activations",
        [Penalty("0", _square, 0.7), Penalty("4", _sparse, 0.5, _scale)],
    ),
    "with batch norm and dropout": (
        "cnn in train",
        [Penalty("1", _square, 0.2), Penalty("3", _square, 0.2), Penalty("8", _sparse)],
    ),
    "inside a transformer": (
        "transformer",
        [Penalty("encoder.layers.0", _square, 0.2), Penalty("encoder.layers.1.linear1", _sparse)],
    ),
    "on an element": (
        "transformer",
        [Penalty("[hidden]", _square, 0.2), Penalty("encoder", _square)],
    ),
    "on a tuple's element": ("lstm", [Penalty("lstm[0]", _square, 0.2)]),
    "with a state": ("average rebound", [Penalty("inner", _square, 0.2, _scale)]),
    "on a module that runs several times": ("layer drop by random", [Penalty("layers.1", _square)]),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_value_and_gradient_are_those_of_naive_code_whatever_is_kept(name):
    case_name, penalties = PENALTIES[name]
    loss, grads = _naive(CASES[case_name](), penalties)
    none, *others = (
        answer(CASES[case_name](), penalties=penalties, retain=r) for r in (0, 3000, 10**9)
    )
    assert none.loss == pytest.approx(loss, rel=TOLERANCE)
    assert difference(none.grads, grads) <= TOLERANCE
    for some in others:
        assert some.loss == none.loss
        assert all(same_bits(some.grads[n], none.grads[n]) for n in none.grads)


def test_a_penalty_counts_where_the_loss_is_flat():
    case = CASES["mlp"]()
    group = Group("z", case.groups["z"])
    result = set_gradient(
        case.model(), [group], Objective(lambda z: z.sum() * 0), penalties=[Penalty("0", _square)]
    )
    assert result.grads["0.weight"].ne(0).any()
    assert result.replayed == 3


@pytest.mark.parametrize(
    ("loss", "wrt"), [(_square, ["4"]), (lambda tap: (tap > 0).double().mean(), None)]
)
def test_a_penalty_without_a_gradient_is_part_of_the_value(loss, wrt):
    case = CASES["mlp"]()
    penalties = [Penalty("0", loss)]
    found, plain = answer(case, penalties=penalties, wrt=wrt), answer(case, wrt=wrt)
    assert found.loss == answer(case, penalties=penalties).loss != plain.loss
    assert all(same_bits(found.grads[name], plain.grads[name]) for name in plain.grads)


def test_a_penalty_reaches_what_the_loss_does_not():
    case = CASES["unused branch"]()
    group = Group("z", case.groups["z"])
    result = set_gradient(
        case.model(),
        [group],
        Objective(lambda z: torch.ones(())),
        penalties=[Penalty("head", _square)],
    )
    assert set(result.unreached) == {"unused.weight", "unused.bias"}


@pytest.mark.parametrize("precision", ["fp64", "bf16", "fp16"])
def test_penalties_work_in_every_precision(precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    shards = [{"0": torch.randn(4, 6)} for _ in range(3)]
    terms = {"penalties": [Penalty("1", _square, 0.5, lambda z: z.square().sum(1))]}
    objective = Objective(lambda z: (z @ z.T).square().mean() + z.sum(0).exp().mean())
    exact = set_gradient(model.double(), [Group("z", shards)], objective, precision="fp64", **terms)
    result = set_gradient(
        model.float(), [Group("z", shards)], objective, precision=precision, **terms
    )
    assert difference(result.grads, exact.grads) < 3e-2
    assert result.loss == pytest.approx(exact.loss, rel=3e-2)


def _stack() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(9)))


def _large(tap: Tensor) -> Tensor:
    """Holds ten times the tap's size for its backward pass."""
    total = tap.new_zeros(())
    for k in range(10):
        total = total + (tap * (k + 1)).sin().sum()
    return total


@pytest.mark.parametrize("retain", [0, 10**9])
def test_a_penalty_is_freed_before_the_next_layer_runs(retain):
    shards = [{"0": torch.randn(500, 64)} for _ in range(2)]

    def run(num_penalties: int) -> int:
        penalties = [Penalty(f"{i}", _large) for i in range(7, 7 - num_penalties, -1)]
        return peak_bytes(
            lambda: set_gradient(
                _stack(),
                [Group("z", shards)],
                Objective(torch.var),
                penalties=penalties,
                retain=retain,
            )
        )

    one, eight = run(1), run(8)
    assert eight <= 1.1 * one


@pytest.mark.parametrize(
    ("penalty", "message"),
    [
        (Penalty("encoder.layer.3", _square), "there are '0', '1', '2', '3'"),
        (Penalty("0[1", _square), "NAME"),
        (Penalty("0", lambda tap: tap), "return one number"),
        (
            Penalty("0", _square, 1.0, lambda z: z.sum()),
            r"of shape \(\d,\), .* got float64 tensor \(\)",
        ),
        (Penalty("0[hidden]", _square), "hidden"),
    ],
)
def test_penalties_that_cannot_be_computed(penalty, message):
    with pytest.raises(BadPenalty, match=message):
        answer(CASES["mlp"](), penalties=[penalty])


def test_a_tuple_needs_an_element():
    with pytest.raises(BadPenalty, match=r'name an element of it, as in "lstm\[0\]"'):
        answer(CASES["lstm"](), penalties=[Penalty("lstm", _square)])


def test_a_penalty_that_is_not_finite():
    with pytest.raises(LossNotFinite, match="from the penalties"):
        answer(CASES["mlp"](), penalties=[Penalty("0", lambda tap: tap.sum() * torch.inf)])


def test_graphs_are_freed_shard_by_shard():
    penalties = [Penalty(f"{i}", _square) for i in range(8)]

    def run(num_shards: int) -> int:
        group = Group("z", [{"0": torch.randn(500, 64)}] * num_shards)
        return peak_bytes(
            lambda: set_gradient(_stack(), [group], Objective(torch.var), penalties=penalties)
        )

    z_bytes = 500 * 64 * 4
    assert run(6) - run(2) <= 4 * 3 * z_bytes  # Z, its leaf's gradient, one more copy


def test_hooks_are_gone_afterwards():
    case = CASES["mlp"]()
    model = case.model()
    answer(case, model, penalties=[Penalty("0", _square)])
    hooks = itertools.chain.from_iterable(m._forward_hooks for m in model.modules())
    assert list(hooks) == []


def test_a_penaltys_gradient_passes_through_hooks_on_the_activation():
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.part = nn.Linear(5, 4, dtype=torch.float64)
            self.head = nn.Linear(4, 3, dtype=torch.float64)
            self.part.register_forward_hook(self._shrink)

        def _shrink(self, _module, _inputs, h):
            h.register_hook(lambda gradient: gradient * 0.25)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.part(x))

    case = Case(Hooked, {"z": [{"0": torch.ones(2, 5, dtype=torch.float64)}]}, _square)
    penalties = [Penalty(at="part", loss=_sparse, weight=2.0)]
    found = answer(case, penalties=penalties)
    loss, grads = _naive(case, penalties)
    assert found.loss == pytest.approx(loss)
    assert difference(found.grads, grads) <= TOLERANCE


class _Slope(nn.Module):
    """Returns an energy's derivative by its input, as models of forces do."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.energy = nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.energy(self.hidden(x).sin())
        return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("retain", [0, 10**9])
def test_a_penalty_is_not_in_what_the_model_itself_differentiates(retain):
    case = Case(seeded(_Slope), CASES["mlp"]().groups, whitening)
    penalties = [Penalty("hidden", _square, 0.3)]
    loss, grads = _naive(case, penalties)
    found = answer(case, penalties=penalties, retain=retain)
    assert found.loss == pytest.approx(loss, rel=1e-12)
    assert difference(found.grads, grads) <= TOLERANCE


class _InATuple(nn.Module):
    """One layer under two names, and a pair in a list as output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.pairs = _Pairs()

    def forward(self, x: Tensor) -> Tensor:
        return self.pairs(self.second(self.first(x)))[1][0]


class _Pairs(nn.Module):
    def forward(self, x: Tensor) -> list[Any]:
        return [x, (2 * x, x.tanh())]


@pytest.mark.parametrize(
    ("at", "taps"),
    [
        ("first", lambda h, k: (h, k)),
        ("second", lambda h, k: (h, k)),
        ("pairs[1][0]", lambda h, k: (2 * k,)),
        ("pairs[1.1]", lambda h, k: (k.tanh(),)),
        ("pairs[-1][-1]", lambda h, k: (k.tanh(),)),
    ],
)
def test_any_name_of_a_submodule_and_any_element_of_its_output_is_a_place(
    at: str, taps: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
) -> None:
    torch.manual_seed(0)
    model, x = _InATuple().to(DEVICE), torch.randn(5, 4, device=DEVICE)
    found = set_gradient(
        model, [Group("z", [{"0": x}])], Objective(_square), penalties=[Penalty(at, _square, 0.5)]
    )
    h = model.first(x)
    k = model.first(h)
    loss = _square(2 * k) + sum(0.5 * _square(tap) for tap in taps(h, k))
    loss.backward()
    assert found.loss == pytest.approx(loss.item())
    assert difference(found.grads, {n: p.grad for n, p in model.named_parameters()}) <= 1e-5
