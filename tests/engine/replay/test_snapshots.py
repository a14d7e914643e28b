"""The buffers before each shard, for models that read them by ways of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, set_gradient
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.prepared import prepared
from gradbox_engine.model.wrt import select
from gradbox_engine.replay.first_pass import GraphCalls, first_pass
from gradbox_engine.replay.retention import GraphBudget
from gradbox_engine.replay.shard_record import ShardRecord
from gradbox_engine.requests import CallOptions, Penalty, Silent
from tests.engine.replay.odd_models import ODD, Norm
from tests.engine.replay.odd_models import rows as _shards
from tests.oracle import TOLERANCE, difference


class _ReadingBeside(Norm):
    """Reads them for something that z does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(5, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        self.beside(x * self.norm.running_var.mean())
        return super().forward(x)


def _records(model: nn.Module, mode: str = "train") -> list[ShardRecord]:
    groups = [Group("z", _shards())]
    positions = [Position(0, shard) for shard in range(len(_shards()))]
    with prepared(model, groups, select(model, None), CallOptions(mode=mode)) as ready:
        records: list[ShardRecord] = []
        calls = GraphCalls(ready, len(_shards()), budget=GraphBudget(0))
        first_pass(ready, positions, records, calls, observer=Silent())
        return records


def test_what_does_not_change_is_kept_once():
    records = _records(Norm(), mode="eval")
    first = records[0].before.values
    for record in records:
        for slot, value in record.after.values.items():
            assert value is first[slot]


@pytest.mark.parametrize("name", ["Norm", "Average", "LateScale"])
def test_what_changes_is_kept_for_every_shard(name):
    records, model = _records(ODD[name].model()), ODD[name].model().train()
    for record, shard in zip(records, _shards(), strict=True):
        for (module, name), value in record.before.values.items():
            assert torch.equal(model.get_buffer(f"{module}.{name}".lstrip(".")), value)
        model(shard["0"])


def test_a_penalty_on_what_z_does_not_show_sees_its_own_statistics():
    def penalty(tap: Tensor) -> Tensor:
        return tap.square().mean()

    model, taps = _ReadingBeside(), []
    model.beside.register_forward_hook(lambda _module, _inputs, output: taps.append(output))
    z = torch.cat([model(shard["0"]) for shard in _shards()])
    (z.sin().sum() + sum(map(penalty, taps))).backward()
    result = set_gradient(
        _ReadingBeside(),
        [Group("z", _shards())],
        Objective(lambda z: z.sin().sum()),
        mode="train",
        penalties=[Penalty("beside", penalty)],
    )
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert difference({n: result.grads[n] for n in expected}, expected) <= TOLERANCE
