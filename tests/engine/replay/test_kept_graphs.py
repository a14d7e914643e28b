"""Graphs kept between the two halves change time and memory, and not one bit of the result."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import CotangentGradient, Group, KeptPass, Objective, set_gradient
from tests import case_models
from tests.cases import CASES, Case
from tests.device import DEVICE, same_bits
from tests.engine.model.test_restore import _assert_unchanged, _state
from tests.engine.replay.halves import Halves, first_half
from tests.engine.replay.odd_models import Blocks, ByAutograd, ByFunc
from tests.oracle import TOLERANCE, difference, naive

PLENTY = 10**9


def assert_same(found: CotangentGradient, expected: CotangentGradient) -> None:
    """Bit by bit, dtypes included."""
    assert found.unreached == expected.unreached
    assert found.grads.keys() == expected.grads.keys()
    for name, gradient in expected.grads.items():
        assert found.grads[name].dtype == gradient.dtype
        assert same_bits(found.grads[name], gradient), name
    assert (found.input_grads is None) == (expected.input_grads is None)
    for group, named in (expected.input_grads or {}).items():
        for argument, shards in named.items():
            for mine, theirs in zip(found.input_grads[group][argument], shards, strict=True):
                assert same_bits(mine, theirs)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("retain", [5000, 20000, PLENTY, "auto"])
def test_what_is_kept_does_not_show(name: str, retain: Any) -> None:
    none, some = first_half(CASES[name]()), first_half(CASES[name](), retain=retain)
    for group, named in none.found.outputs.items():
        assert all(same_bits(some.found.outputs[group][n], z) for n, z in named.items())
    assert all(same_bits(some.first.buffers[n], b) for n, b in none.first.buffers.items())
    assert_same(some.gradient(), none.gradient())


@pytest.mark.parametrize("name", CASES)
def test_with_room_for_all_nothing_is_replayed(name: str) -> None:
    case = CASES[name]()
    halves = first_half(case, retain=PLENTY)
    found = halves.gradient()
    assert (found.retained, found.replayed) == (sum(map(len, case.groups.values())), 0)
    grads = {n: g for n, g in naive(case).grads.items() if not n.startswith("loss.")}
    assert difference(found.grads, grads) <= TOLERANCE
    assert halves.kept.num_kept == 0


@pytest.mark.parametrize(
    "terms",
    [
        {"precision": "fp64"},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"streams": "sample"},
        {"order": torch.arange(14).flip(0)},
        {"wrt": ["3.*", "inputs.0"]},
        {"wrt": ["inputs.*"]},
        {"weights": {"0.weight": torch.full((8, 5), 0.3)}},
        {"weights": {"0.weight": torch.full((8, 5), 0.3)}, "precision": "fp64"},
    ],
    ids=str,
)
def test_under_all_terms(terms: dict[str, Any]) -> None:
    case = CASES["mlp"]()
    shards = [{"0": shard["0"].float()} for shard in case.groups["z"]]
    case = replace(case, groups={"z": shards}, wrt=None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 3))
    expected = first_half(case, model, **terms).gradient()
    every = first_half(case, model, retain=PLENTY, **terms)
    assert every.kept.num_kept == 4
    half = first_half(case, model, retain=round(every.kept.num_bytes * 0.7), **terms)
    assert 0 < half.kept.num_kept < 4
    assert_same(every.gradient(), expected)
    assert_same(half.gradient(), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_models(reentrant: bool) -> None:
    case = replace(CASES["mlp"](), groups={"z": _rows(3, 4)})
    none, some = (
        first_half(case, Blocks(reentrant=reentrant), retain=retain) for retain in (0, PLENTY)
    )
    assert some.kept.num_kept == 2
    assert_same(some.gradient(), none.gradient())


@pytest.mark.parametrize("retain", [3000, PLENTY])
@pytest.mark.parametrize("kind", [ByAutograd, ByFunc])
def test_models_that_differentiate_in_their_forward_pass(kind: Any, retain: int) -> None:
    case = CASES["mlp"]()
    none, some = first_half(case, kind()), first_half(case, kind(), retain=retain)
    if kind is ByFunc:  # which does not let its saved tensors be measured
        assert some.first.kept is None
    assert_same(some.gradient(), none.gradient())


@pytest.mark.parametrize("name", ["cnn in train", "classic spectral norm", "average rebound"])
def test_the_model_is_as_it_was_between_the_halves_and_after(name: str) -> None:
    case = CASES[name]()
    model = case.model().to(DEVICE)
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    before = _state(model)
    halves = first_half(case, model, retain=PLENTY, precision="fp64")
    _assert_unchanged(model, before)
    halves.gradient()
    _assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("first", "second", "retained"),
    [
        (None, ["4.*"], 0),
        (["4.*"], ["2.*", "4.*"], 0),
        (None, ["*"], 4),
        (None, ["*", "inputs.0"], 0),
        (["*", "inputs.0"], ["*"], 0),
        (["*", "inputs.0"], ["*", "inputs.z.0"], 4),
    ],
)
def test_graphs_of_another_wrt_are_not_used(first: Any, second: Any, retained: int) -> None:
    case = CASES["mlp"]()
    halves = first_half(case, retain=PLENTY, wrt=first)
    found = halves.gradient(wrt=second)
    assert (found.retained, found.replayed) == (retained, 4 - retained)
    assert halves.kept.num_kept == 0
    assert_same(found, first_half(case, wrt=first).gradient(wrt=second))


def test_only_the_groups_of_other_inputs_are_replayed() -> None:
    case = CASES["two towers"]()
    halves = first_half(case, retain=PLENTY, wrt=["*", "inputs.images.*", "inputs.texts.*"])
    found = halves.gradient(wrt=["*", "inputs.images.*"])
    assert (found.retained, found.replayed) == (3, 2)


def test_each_part_of_the_cotangents_finds_its_graphs() -> None:
    case = CASES["two towers"]()
    halves, other = first_half(case, retain=PLENTY), first_half(case)
    cotangents = halves.cotangents()
    for group, retained, left in [("texts", 2, 3), ("images", 3, 0), ("texts", 0, 0)]:
        part = {group: cotangents[group]}
        found = halves.gradient(part)
        assert found.retained == retained
        assert halves.kept.num_kept == left
        assert_same(found, other.gradient(part))


def test_a_graph_whose_cotangent_is_zero_is_freed() -> None:
    halves = first_half(CASES["mlp"](), retain=PLENTY)
    cotangents = halves.cotangents()
    cotangents["z"][""][4:8] = 0
    found = halves.gradient(cotangents)
    assert (found.retained, found.replayed) == (3, 0)
    assert halves.kept.num_kept == 0


def test_an_overflow_in_half_precision_replays_at_a_smaller_scale() -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * 1e3).tanh() * 1e-3

    case = replace(
        CASES["mlp"](), groups={"z": [{"0": s["0"].float()} for s in _rows(4, 3)]}, loss=torch.sum
    )
    none, some = (
        first_half(case, Steep(), retain=retain, precision="fp16") for retain in (0, PLENTY)
    )
    cotangents = {"z": {"": torch.full((7, 3), 1e-3)}}
    cotangents["z"][""][0] = 1e6
    assert_same(some.gradient(cotangents), none.gradient(cotangents))


class _Watched(torch.autograd.Function):
    """Saves a tensor of its own, and knows whether it is still there."""

    saved: list[weakref.ref[Tensor]] = []  # noqa: RUF012 - emptied by the fixture

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        product = x.exp()
        ctx.save_for_backward(product)
        ctx.held = torch.zeros(3)
        _Watched.saved.append(weakref.ref(ctx.held))
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (product,) = ctx.saved_tensors
        return gradient * product


class _WatchedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(_Watched.apply(self.linear(x)).repeat(1, 2)[:, :5])


def _alive() -> int:
    return sum(reference() is not None for reference in _Watched.saved)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    _Watched.saved.clear()


def test_memory_is_freed_when_it_is_dropped_and_when_it_was_used() -> None:
    case = CASES["mlp"]()
    none = first_half(case, _WatchedModel())
    assert none.first.kept is None
    assert _alive() == 0
    some = first_half(case, _WatchedModel(), retain=PLENTY)
    assert _alive() == 4
    some.kept.free_one()
    assert _alive() == 3
    found = some.gradient()
    assert (found.retained, found.replayed) == (3, 1)
    assert _alive() == 0
    assert_same(found, none.gradient())
    some = first_half(case, _WatchedModel(), retain=PLENTY)
    some.kept.free()
    assert _alive() == 0
    assert some.kept.num_bytes == 0
    assert_same(some.gradient(), found)


def test_a_last_shard_that_the_loss_does_not_read_holds_no_graph_in_the_replay() -> None:
    model, alive = _WatchedModel(), []
    model.register_forward_pre_hook(lambda *_: alive.append(_alive()))
    set_gradient(model, [Group("z", _rows(3, 3, 3))], Objective(lambda z: z[:3].sum()), retain=0)
    assert alive == [0, 0, 0, 0]


class _Older:
    """Passes that were kept before, oldest first."""

    def __init__(self) -> None:
        self.passes: list[KeptPass] = []

    @property
    def num_bytes(self) -> float:
        return sum(kept.num_bytes for kept in self.passes)

    @property
    def newest_bytes(self) -> int:
        return next((kept.newest_bytes for kept in self.passes[::-1] if kept.num_kept), 0)

    def free_oldest(self) -> None:
        next(kept for kept in self.passes if kept.num_kept).free_one()


@pytest.mark.parametrize(
    ("room", "expected"), [(20.5, [4, 4, 4]), (9.5, [1, 4, 4]), (6.5, [0, 2, 4]), (2.5, [0, 0, 2])]
)
def test_older_graphs_give_way_within_one_budget(room: float, expected: list[int]) -> None:
    case = replace(CASES["mlp"](), groups={"z": _rows(4, 4, 4, 4)})
    one_bytes = first_half(case, retain=PLENTY).kept.num_bytes / 4
    older = _Older()
    model, passes = case.model().to(DEVICE), []
    for seed in range(3):
        passes.append(
            first_half(case, model, retain=round(room * one_bytes), older=older, seed=seed)
        )
        older.passes.append(passes[-1].kept)
        assert older.num_bytes <= room * one_bytes
    found = [halves.gradient() for halves in reversed(passes)][::-1]
    assert [gradient.retained for gradient in found] == expected
    for seed, gradient in enumerate(found):
        assert_same(gradient, first_half(case, seed=seed).gradient())


def test_a_pass_that_keeps_nothing_leaves_older_graphs_alone() -> None:
    case, older = CASES["mlp"](), _Older()
    older.passes.append(first_half(case, retain=PLENTY).kept)
    first_half(case, retain=0, older=older)
    assert older.passes[0].num_kept == 4


@pytest.mark.parametrize(
    ("name", "weight", "overlay_bytes"),
    [
        ("mlp", "2.weight", 512),
        ("cnn in train", "4.weight", 1728),
        ("cnn in eval", "1.running_var", 0),
        ("cnn in train", "1.running_var", 0),
    ],
)
def test_passes_under_different_weights_may_wait_side_by_side(
    name: str, weight: str, overlay_bytes: int
) -> None:
    case = CASES[name]()
    model = case.model().to(DEVICE)
    shape = model.state_dict()[weight].shape
    overlays = [{weight: torch.full(shape, value).double()} for value in (0.1, 0.2)]
    passes = [first_half(case, model, retain=PLENTY, weights=weights) for weights in overlays]
    assert [halves.kept.overlay_bytes for halves in passes] == [overlay_bytes] * 2
    for halves, weights in zip(passes, overlays, strict=True):
        expected = first_half(case, weights=weights)
        found = halves.gradient()
        assert found.retained == 4
        assert_same(found, expected.gradient())
        for buffer, value in expected.first.buffers.items():
            assert same_bits(halves.first.buffers[buffer], value)


class _Crowded(torch.autograd.Function):
    """Runs out of memory once, on the way back."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if _Crowded.armed and gradient.shape[0] == 2:
            _Crowded.armed = False
            raise torch.OutOfMemoryError("no room")
        return gradient


class _CrowdedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = case_models.cnn()[:2]
        self.head = nn.Linear(4 * 36, 3).double()
        torch.manual_seed(0)
        nn.init.normal_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_Crowded.apply(torch.dropout(self.inner(x), 0.5, True)).flatten(1))


def test_where_memory_runs_out_the_rest_is_replayed() -> None:
    case: Case = replace(CASES["cnn in train"](), loss=lambda z: z.sin().mean())
    model = _CrowdedModel()
    expected = first_half(case, model).gradient()
    halves: Halves = first_half(case, model, retain=PLENTY)
    _Crowded.armed = True
    found = halves.gradient()
    assert not _Crowded.armed
    assert found.replayed == 4
    assert_same(found, expected)


def _rows(*sizes: int, features: int = 5) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"0": torch.randn(n, features, generator=generator, dtype=torch.float64)} for n in sizes
    ]


class _Growing(nn.Module):
    """Multiplies by a buffer that each call lets grow first, whose numbers its graph reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(1.5)
        return self.linear(x) * self.scale


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_graphs_read_buffers_as_they_were_after_their_shard(precision: Any) -> None:
    case = CASES["mlp"]()
    shards = [{"0": shard["0"].float()} for shard in case.groups["z"]]
    case = replace(case, groups={"z": shards}, wrt=None, mode="train")
    expected = first_half(case, _Growing(), precision=precision).gradient()
    halves = first_half(case, _Growing(), retain=PLENTY, precision=precision)
    assert halves.kept.num_kept == 4
    found = halves.gradient()
    assert found.retained == 4
    assert_same(found, expected)
