"""State that shards change: running statistics compose over ranges, anything else refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradbox_engine import CoupledShards, Group, ModelCallFailed, Objective, set_gradient
from gradbox_engine.ranges import NormStatistics, NormUpdate
from gradbox_engine.ranges.norm_statistics import after
from gradbox_engine.ranges.one_device import OneDevice
from gradbox_engine.set_loss import held_job, split_set_gradient
from tests.case_models import seeded
from tests.cases import CASES, Case, whitening
from tests.device import DEVICE, moved
from tests.engine.ranges.running import EXACT, even, in_ranges, on_devices
from tests.engine.replay.running import answer
from tests.oracle import difference, naive


def _case(module: Callable[[], nn.Module], num_shards: int = 7) -> Case:
    generator = torch.Generator().manual_seed(1)
    shards = [{"0": torch.randn(3, 5, generator=generator).double() + i} for i in range(num_shards)]
    return Case(seeded(module), {"z": shards}, whitening)


def _used(norm: nn.BatchNorm1d, *, num_batches: int = 5) -> nn.BatchNorm1d:
    """Give a batch norm a past."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.running_mean.copy_(torch.linspace(-2, 2, norm.num_features))
    norm.running_var.copy_(torch.linspace(0.5, 3, norm.num_features))
    norm.num_batches_tracked.fill_(num_batches)
    return norm


class SometimesTwice(nn.Module):
    """Calls one batch norm twice on some shards and never on others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = _used(nn.BatchNorm1d(5, momentum=0.3))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        number = round(float(x.detach().mean()))
        for _ in range(number % 3):
            x = self.norm(x) + number
        return self.head(x)


def _with(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(5, 4), norm(), nn.Tanh(), nn.Linear(4, 3))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "momentum": _with(lambda: _used(nn.BatchNorm1d(4))),
    "a new one": _with(lambda: nn.BatchNorm1d(4)),
    "an average": _with(lambda: nn.BatchNorm1d(4, momentum=None)),
    "an average with a past": _with(lambda: _used(nn.BatchNorm1d(4, momentum=None))),
    "momentum one": _with(lambda: _used(nn.BatchNorm1d(4, momentum=1.0))),
    "momentum zero": _with(lambda: _used(nn.BatchNorm1d(4, momentum=0.0))),
    "sometimes twice, sometimes not": SometimesTwice,
}


def _floats(buffers: dict[str, Tensor] | None) -> dict[str, Tensor]:
    return {name: buffer.double() for name, buffer in (buffers or {}).items()}


@pytest.mark.parametrize("num_ranges", [2, 7])
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics_are_those_of_one_pass(name, num_ranges):
    found = in_ranges(_case(NORMS[name]), num_ranges)
    expected = naive(_case(NORMS[name]))
    assert list(found.buffers) == list(answer(_case(NORMS[name])).buffers)
    assert difference(_floats(found.buffers), _floats(expected.buffers)) <= EXACT
    assert difference(found.grads, expected.grads) <= 1e-10


def test_running_statistics_from_several_devices():
    found, _ = on_devices(CASES["cnn in train"](), 3)
    expected = naive(CASES["cnn in train"]()).buffers
    assert difference(_floats(found.buffers), _floats(expected)) <= EXACT


def test_statistics_in_float32_stay_near_to_one_pass():
    model = _with(lambda: _used(nn.BatchNorm1d(4), num_batches=10**6))
    case = _case(model)
    shards = [{"0": shard["0"].float()} for shard in case.groups["z"]]
    in_float = Case(lambda: seeded(model)().float(), {"z": shards}, whitening)
    found, one = in_ranges(in_float, 3).buffers, answer(in_float).buffers
    assert found["1.running_var"].dtype == torch.float32
    assert difference(_floats(found), _floats(one)) <= 1e-6


def test_what_a_range_makes_of_other_statistics():
    def statistics(value: float, num_batches: int) -> NormStatistics:
        return NormStatistics(torch.tensor([value]), torch.tensor([value]), num_batches)

    # Two batches of means 4 and 8 with momentum 1/2, from 0: 2, then 5. From 16: 10, then 9.
    update = NormUpdate(0.5, statistics(0.0, 0), statistics(5.0, 2), left_out=False)
    assert after(statistics(16.0, 3), update, module="") == statistics(9.0, 5)
    # As an average of all: two batches of 4 and 8 after one of 1.
    update = NormUpdate(None, statistics(0.0, 0), statistics(6.0, 2), left_out=False)
    assert after(statistics(1.0, 1), update, module="").mean == pytest.approx(13 / 3)


def _with_an_empty_shard(norm: str, empty: int) -> Case:
    case = _case(NORMS[norm])
    case.groups["z"][empty] = {"0": torch.zeros(0, 5, dtype=torch.float64)}
    return case


@pytest.mark.parametrize("norm", ["momentum", "an average"])
@pytest.mark.parametrize("empty", [4, 6])
def test_a_range_with_a_shard_that_is_counted_and_moves_no_statistics_is_refused(norm, empty):
    with pytest.raises(CoupledShards, match=r"1\.running_mean"):
        in_ranges(_with_an_empty_shard(norm, empty), 2, returns=("grads", "buffers"))


@pytest.mark.parametrize(("norm", "empty"), [("momentum", 1), ("momentum zero", 6)])
def test_a_shard_that_moves_no_statistics_is_let_through_where_that_changes_nothing(norm, empty):
    case = _with_an_empty_shard(norm, empty)
    found = in_ranges(case, 2, returns=("grads", "buffers"))
    expected = naive(_with_an_empty_shard(norm, empty))
    assert difference(_floats(found.buffers), _floats(expected.buffers)) <= EXACT


class ReadsStatistics(nn.Module):
    """Normalises by its running statistics in training mode too, as batch renormalisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.norm.running_mean


class OtherRule(nn.BatchNorm1d):
    """Moves its statistics by another rule than its momentum says."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        return F.batch_norm(x, self.running_mean, self.running_var, training=True, momentum=0.37)


class CountsCalls(nn.Module):
    """Scales by a number that is neither a buffer nor a random one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


class LastShardAlone(nn.Module):
    """Changes a buffer once, on the shard that no other one follows."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("last", torch.full((1,), torch.nan))
        self.register_buffer("never", torch.full((1,), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 5:
            self.last.fill_(1)
        return self.linear(x)


REFUSED = {
    "reads its statistics": (ReadsStatistics, "norm.running_mean"),
    "another rule": (_with(lambda: OtherRule(4)), "1.running_mean"),
    "counts calls": (CountsCalls, "calls"),
    "changes a buffer once": (LastShardAlone, "last"),
    "instance norm": (_with(lambda: _Unpooled(nn.InstanceNorm1d(2, track_running_stats=True))),
                      "1.norm.running_mean"),
}  # fmt: skip


class _Unpooled(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.view(-1, 2, 2)).flatten(1)


@pytest.mark.parametrize("name", REFUSED)
def test_shards_that_depend_on_others_are_not_split(name):
    model, buffer = REFUSED[name]
    with pytest.raises(CoupledShards) as caught:
        on_devices(_case(model), 3, retain=10**9)
    assert caught.value.name == buffer
    assert in_ranges(_case(model), 1, retain=10**9).loss == pytest.approx(naive(_case(model)).loss)


class _ScaledByFirst(nn.Linear):
    """Takes the scale of its weight from the first batch."""

    begun = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun:
            self.weight.data.div_(x.detach().abs().max())
            type(self).begun = True
        return super().forward(x)


class _Hooking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.register_hook(lambda gradient: 2 * gradient)
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "told"), [(_ScaledByFirst, "as it was registered"), (_Hooking, "its hooks")]
)
@pytest.mark.parametrize("retain", [0, 10**9])
def test_shards_that_change_the_model_are_refused_while_it_is_held(kind, told, retain):
    model = kind(4, 3).to(DEVICE)
    kind.begun = False
    groups = [Group("z", [moved({"0": torch.randn(5, 4)}) for _ in range(4)])]
    parts, loss = even(groups, 2), Objective(torch.sum)
    with (
        suppress(ModelCallFailed),  # on the way out once more
        held_job(model, groups, retain=retain) as job,
        pytest.raises(ModelCallFailed, match=f"'weight'.*{told}"),
    ):
        split_set_gradient(OneDevice(job), parts, groups, loss, device=DEVICE)


@pytest.mark.parametrize("own", [False, True])
def test_what_is_put_back_after_the_job_is_not_refused_while_the_model_is_held(own):
    table = nn.Embedding(10, 4, max_norm=0.5).to(DEVICE)
    weights = {"weight": torch.randn(10, 4)} if own else None
    groups = [Group("z", [moved({"0": torch.arange(i, i + 3)}) for i in range(4)])]
    for _ in range(2):  # the first job, and one that only the version counter tells of
        job = (even(groups, 2), groups, Objective(lambda z: z.square().sum()))
        found = set_gradient(table, *job[1:], ranges=job[0], weights=weights)
        expected = set_gradient(table, *job[1:], weights=weights)
        assert difference(found.grads, expected.grads) <= 1e-6


def test_frozen_statistics_do_not_matter():
    found = in_ranges(CASES["cnn in eval"](), 2)
    assert difference(found.grads, answer(CASES["cnn in eval"]()).grads) <= EXACT


def test_the_model_is_as_it_was():
    case = CASES["cnn in train"]()
    model = case.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    in_ranges(case, 3, model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
