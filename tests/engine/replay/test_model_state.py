"""What is looked at in a model, what its states keep and checkpoints tell, what is put back."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, ReplayMismatch, set_gradient, set_outputs
from gradbox_engine.model.state.model_state import AS_REGISTERED, ModelState
from tests.device import DEVICE
from tests.engine.interrupted import Kept, Killed, KilledAt
from tests.oracle import TOLERANCE, difference
from tests.stateful_models import Calls, Reversing, groups, loss


def _x() -> Tensor:
    return groups()[0].shards[0]["0"].to(DEVICE)


class _Averaging(nn.Module):
    """Scales its output by a mean of its outputs so far, a tensor that its graphs save."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3, dtype=torch.float64, device=DEVICE)
        self.mean = torch.ones(3, dtype=torch.float64, device=DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        self.mean.mul_(0.5).add_(z.detach().mean(0))
        return z * self.mean  # type: ignore[no-any-return]


@pytest.mark.parametrize("retain", [0, 1000, 10**9])
def test_a_graph_that_saved_an_unregistered_tensor_finds_its_numbers(retain):
    model, mean = _Averaging(), torch.ones(3, dtype=torch.float64, device=DEVICE)
    zs = []
    for shard in groups()[0].shards:
        z = model.linear(shard["0"].to(DEVICE))
        mean = 0.5 * mean + z.detach().mean(0)
        zs.append(z * mean)
    loss(torch.cat(zs)).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    found = set_gradient(model, groups(), Objective(loss), mode="train", retain=retain)
    assert difference(found.grads, expected) <= TOLERANCE
    assert torch.equal(model.mean, torch.ones_like(model.mean))


def _model(kept: Callable[[], Any] = Calls) -> Any:
    return Reversing(lambda m, _: m.kept.next(), kept=kept).train()


def test_a_cached_tensor_is_in_no_snapshot_and_changes_nothing():
    model = _model()
    objects = ModelState(model)
    z = model.linear(_x())
    model.kept.latest = [z]
    state, graph = objects.state(), weakref.ref(z)
    assert not objects.in_order
    objects.restore(AS_REGISTERED)
    del z
    assert graph() is None
    assert state
    assert not state.kept
    assert not state.names


def test_a_new_object_with_a_graph_in_it_is_in_no_snapshot():
    model = _model()
    state = ModelState(model)
    model.kept = SimpleNamespace(seen=[model.linear(_x())], calls=1)
    graph = weakref.ref(model.kept.seen[0])
    found = state.state()
    state.restore(AS_REGISTERED)
    assert found
    assert not found.kept
    assert graph() is None


def test_equal_numbers_and_empty_containers_that_are_bound_anew_are_no_change():
    model = _model()
    model.kept.calls, model.kept.latest = 1000, {"seen": set()}
    objects = ModelState(model)
    model.kept.calls, model.kept.latest["seen"] = int("1000"), set()
    assert not objects.state()


def test_what_a_model_holds_of_libraries_is_left_alone():
    model = _model(lambda: {"log": logging.getLogger("a.b"), "counter": Calls()})
    objects = ModelState(model)
    model.kept["log"].extra = 1
    model.kept["counter"].calls = 2
    objects.restore(AS_REGISTERED)
    assert model.kept["log"].extra == 1
    assert model.kept["counter"].calls == 0


def test_a_model_that_holds_a_trainer_and_its_data_is_not_searched():
    model = _model()
    model.kept.latest = SimpleNamespace(data=[{"text": str(i)} for i in range(20_000)])
    objects = ModelState(model)
    model.kept.calls = 1
    assert not objects.state()
    assert not objects.tensors


def test_an_empty_table_that_is_filled_and_replaced_is_put_back_empty():
    model = _model()
    registered, table = ModelState(model), model._forward_hooks
    model.register_forward_hook(lambda *_: None)
    model._forward_hooks = type(table)()
    state = registered.state()
    registered.restore(AS_REGISTERED)
    assert model._forward_hooks is table
    assert not table
    registered.restore(state)
    assert len(table) == 1
    assert not model._forward_hooks


def test_what_a_hook_notes_for_others_stays():
    model, seen = _model(), []
    model.register_forward_hook(lambda *_: seen.append(1))
    set_gradient(model, groups(), Objective(loss), retain=0)
    assert len(seen) == 9


def test_unregistered_tensors_are_put_back_after_a_job():
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)
            self.hidden = [nn.BatchNorm1d(3), SimpleNamespace(sum=torch.zeros(3))]
            self.to(DEVICE, torch.float64)
            self.hidden[0].to(DEVICE, torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            norm, kept = self.hidden
            z = norm(self.linear(x))
            kept.sum += z.detach().cpu().mean(0)
            return z  # type: ignore[no-any-return]

    model = Hidden()
    norm, kept = model.hidden
    assert isinstance(norm, nn.BatchNorm1d)
    set_gradient(model, [Group("z", [groups()[0].shards[1]])], Objective(loss), mode="train")
    assert norm.weight.grad is None
    assert norm.running_mean is not None
    assert norm.running_mean.abs().max() == 0
    assert kept.sum.abs().max() == 0


class _CountingByIterator(nn.Linear):
    """Scales its output by a count that no snapshot has."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(5, 3, dtype=torch.float64, device=DEVICE)
        self.calls = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.calls)


def test_outputs_that_read_what_no_checkpoint_has_are_not_gone_on_with():
    kept, kind = Kept(), _CountingByIterator
    with pytest.raises(Killed):
        set_outputs(kind(), groups(), checkpoints=kept, observer=KilledAt("forward", 3))
    with pytest.raises(ReplayMismatch, match="shard 2: expected the replay to repeat"):
        set_outputs(kind(), groups(), checkpoints=kept)
