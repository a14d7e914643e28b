"""Keeping graphs changes the time and the memory, and not one bit of the result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, ModelCallFailed, Objective, host_memory, set_gradient
from gradbox_engine.replay import retention
from gradbox_engine.replay.retention import HELD_FACTOR, GraphBudget, graph_budget
from gradbox_engine.replay.saved_tensors import SavedTensors
from tests.cases import CASES
from tests.device import REPLAYED, same_bits
from tests.engine.replay.running import answer

PLENTY = 10**9


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("retain", [5000, 20000, PLENTY, "auto"])
def test_what_is_kept_does_not_show(name, retain):
    none, some = answer(CASES[name](), retain=0), answer(CASES[name](), retain=retain)
    assert some.loss == pytest.approx(none.loss, rel=REPLAYED, abs=0)
    assert all(same_bits(some.grads[n], none.grads[n]) for n in none.grads)
    assert all(same_bits(some.buffers[n], none.buffers[n]) for n in none.buffers)


@pytest.mark.parametrize("name", CASES)
def test_with_room_for_all_nothing_is_replayed(name):
    result = answer(CASES[name](), retain=PLENTY)
    assert (result.retained, result.replayed) == (sum(result.shards.values()), 0)


def _counted(module: nn.Module, x: Tensor) -> int:
    saved = SavedTensors(parameters={p.untyped_storage().data_ptr() for p in module.parameters()})
    with saved.hooks():
        out = module(x)
    assert out.grad_fn is not None
    return saved.num_bytes


def test_saved_bytes_are_counted_by_storage_without_parameters():
    x = torch.zeros(10, 100)
    two = nn.Sequential(nn.Linear(100, 50), nn.Tanh(), nn.Linear(50, 50))
    # The input of each linear layer; tanh saves its output, which is the second one's input.
    assert _counted(two, x) == x.nbytes + 10 * 50 * 4


def test_a_budget_keeps_as_many_as_fit():
    def kept(retain: int) -> int:
        model = nn.Sequential(nn.Linear(8, 100), nn.Tanh(), nn.Linear(100, 1))
        shards = [{"0": torch.ones(10, 8)}] * 10
        result = set_gradient(model, [Group("z", shards)], Objective(torch.sum), retain=retain)
        assert result.retained + result.replayed == 10
        return result.retained

    one_shard_bytes = 10 * (8 + 100) * 4 * 1.3
    assert [kept(round(n * one_shard_bytes) + 50) for n in (0, 1, 4, 9, 20)] == [1, 2, 5, 10, 10]


def test_graphs_of_other_shapes_are_counted_anew():
    model = nn.Sequential(nn.Linear(8, 100), nn.Tanh(), nn.Linear(100, 1))
    shards = [{"0": torch.ones(rows, 8)} for rows in (10, 10, 40, 40, 10)]
    two_small_and_a_large = round(6 * 10 * (8 + 100) * 4 * HELD_FACTOR) + 50
    result = set_gradient(
        model, [Group("z", shards)], Objective(torch.sum), retain=two_small_and_a_large
    )
    assert (result.retained, result.replayed) == (4, 1)  # the last one is kept in any case


@pytest.mark.parametrize(("with_headroom", "expected"), [(False, 4), (True, 3)])
def test_headroom_leaves_space_for_the_shard_that_runs(with_headroom, expected):
    budget = GraphBudget(4 * HELD_FACTOR * 100, with_headroom=with_headroom)
    assert sum(budget.has_room() and budget.admit(100) for _ in range(6)) == expected


def test_a_graph_that_turns_out_larger_than_the_room_is_freed():
    budget = GraphBudget(HELD_FACTOR * 250)
    assert budget.admit(100)
    assert not budget.admit(200)
    assert not budget.has_room()  # for another one like it
    assert budget.admit(150)


def test_an_exhausted_budget_admits_nothing():
    budget = GraphBudget(HELD_FACTOR * 250)
    budget.exhaust()
    assert not budget.has_room()
    assert not budget.admit(1)


class _Overflowing(torch.autograd.Function):
    """Runs out of memory, once, in the pass that the test chooses."""

    armed = ""
    error: type[Exception] = torch.OutOfMemoryError

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        if _Overflowing.armed == "forward" and x.flatten()[0] == 3:
            _Overflowing.armed = ""
            raise _Overflowing.error("DefaultCPUAllocator: can't allocate memory")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        if _Overflowing.armed == "backward":
            _Overflowing.armed = ""
            raise _Overflowing.error("DefaultCPUAllocator: can't allocate memory")
        return gradient


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below = nn.Linear(4, 4).double()
        self.above = nn.Linear(4, 4).double()
        self.norm = nn.BatchNorm1d(4).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.dropout(self.norm(self.below(x)), 0.5, True)
        return self.above(_Overflowing.apply(hidden + _Overflowing.apply(x)))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, MemoryError])
@pytest.mark.parametrize("armed", ["forward", "backward"])
def test_where_memory_runs_out_the_graphs_go_and_the_result_is_the_same(armed, error, monkeypatch):
    monkeypatch.setattr(_Overflowing, "error", error)
    shards = [{"0": torch.full((3, 4), float(i)).double() + torch.eye(3, 4)} for i in range(6)]
    shards[3] = {"0": torch.full((3, 4), 3.0, dtype=torch.float64)}
    terms = {"mode": "train", "returns": ("buffers",)}
    objective = Objective(lambda z: z.sin().sum() ** 2)
    expected = set_gradient(_Layers(), [Group("z", shards)], objective, **terms)
    _Overflowing.armed = armed
    result = set_gradient(_Layers(), [Group("z", shards)], objective, retain=PLENTY, **terms)
    assert _Overflowing.armed == ""
    assert result.replayed > 0
    assert all(torch.equal(result.grads[n], expected.grads[n]) for n in expected.grads)
    assert all(torch.equal(result.buffers[n], expected.buffers[n]) for n in expected.buffers)


def test_a_loss_that_needs_the_memory_of_the_graphs_gets_it():
    calls = []

    def loss(z: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        return z.var()

    case = CASES["mlp"]()
    group = Group("z", case.groups["z"])
    result = set_gradient(case.model(), [group], Objective(loss), retain=PLENTY)
    assert (result.retained, result.replayed) == (0, 4)
    expected = set_gradient(case.model(), [group], Objective(torch.var))
    assert all(torch.equal(result.grads[n], expected.grads[n]) for n in expected.grads)


def test_auto_stays_within_the_control_group(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 600000\ninactive_file 100000\n")
    budget = graph_budget("auto", [torch.device("cpu")], sums_bytes=50_000)
    room_bytes = (400_000 * 0.5 - 50_000) / HELD_FACTOR
    assert not budget.admit(int(room_bytes / 2) + 10)  # with as much again for the shard that runs
    assert budget.admit(int(room_bytes / 2) - 10)


@pytest.mark.parametrize(("num_shards", "num_readings"), [(1, 0), (3, 1)])
def test_free_memory_is_measured_once_and_only_where_a_graph_may_be_kept(
    num_shards, num_readings, monkeypatch
):
    readings = []
    monkeypatch.setattr(retention, "_free_bytes", lambda device: readings.append(device) or 1e9)
    case = CASES["mlp"]()
    group = Group("z", case.groups["z"][:num_shards])
    set_gradient(case.model(), [group], Objective(torch.sum), retain="auto")
    assert len(readings) == num_readings


def test_one_shard_too_large_is_the_callers_to_know():
    _Overflowing.armed = "forward"
    shards = [{"0": torch.full((3, 4), 3.0, dtype=torch.float64)}]
    with pytest.raises(torch.OutOfMemoryError):
        set_gradient(_Layers(), [Group("z", shards)], Objective(torch.sum))
    assert _Overflowing.armed == ""


class _OverwritesWhatItSaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).exp()
        if x.sum() > 0:
            h.mul_(2)
        return h + 0


@pytest.mark.parametrize("retain", [0, 10**9])
def test_a_graph_whose_saved_tensor_was_overwritten_is_refused_as_in_plain_torch(retain):
    # Of the last shard's graph torch itself keeps the tensors.
    shards = [{"0": torch.full((2, 5), x, dtype=torch.float64)} for x in (1.0, -1.0, -1.0)]
    with pytest.raises(ModelCallFailed, match="modified by an in"):
        set_gradient(
            _OverwritesWhatItSaved(), [Group("z", shards)], Objective(torch.sum), retain=retain
        )
