"""The buffers before each shard, for models that read them by ways of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, SetGradient, set_gradient
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.prepared import prepared
from gradbox_engine.model.wrt import select
from gradbox_engine.replay.first_pass import GraphCalls, first_pass
from gradbox_engine.replay.retention import GraphBudget
from gradbox_engine.replay.shard_record import ShardRecord
from gradbox_engine.requests import CallOptions, Penalty, Silent
from tests.oracle import TOLERANCE, difference

NUM_SHARDS = 6


def _shards() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        {"0": torch.randn(3, 5, generator=generator, dtype=torch.float64)}
        for _ in range(NUM_SHARDS)
    ]


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 4).double()
        self.norm = nn.BatchNorm1d(4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class _Reading(_Norm):
    """Reads the statistics of its batch norm by a way of its own."""

    def forward(self, x: Tensor) -> Tensor:
        shift = self.norm.running_mean.clone()
        return super().forward(x) * (1 + shift)


class _ReadingUnseen(_Norm):
    """Reads them in a factor of its graph, which later shards overwrite, and which z hides."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        hidden = self.linear(x) * self.norm.running_mean
        return z + (hidden - hidden.detach())


class _ReadingEarly(_Norm):
    """Reads them before its batch norm overwrites them, as autograd does not notice."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x) * self.norm.running_var
        return z + super().forward(x)


class _ReadingBeside(_Norm):
    """Reads them for something that z does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(5, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        self.beside(x * self.norm.running_var.mean())
        return super().forward(x)


class _Average(_Norm):
    """Has a buffer of another kind besides."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        self.average.mul_(0.9).add_(0.1 * z.detach().mean(0))
        return z + self.average


class _AverageUnseen(_ReadingUnseen, _Average):
    """Both."""


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx, z: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale.clone())
        return z.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradient * scale, None


class _LateScale(_Norm):
    """Has a buffer that changes from the fourth call on, and shows in gradients alone."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        if self.norm.num_batches_tracked > 3:
            self.scale.mul_(0.5)
        return _Scaled.apply(z, self.scale)


def _records(model: nn.Module, mode: str = "train") -> list[ShardRecord]:
    groups = [Group("z", _shards())]
    positions = [Position(0, shard) for shard in range(NUM_SHARDS)]
    with prepared(model, groups, select(model, None), CallOptions(mode=mode)) as ready:
        records: list[ShardRecord] = []
        calls = GraphCalls(ready, NUM_SHARDS, budget=GraphBudget(0))
        first_pass(ready, positions, records, calls, observer=Silent())
        return records


def test_what_does_not_change_is_kept_once():
    records = _records(_Norm(), mode="eval")
    first = records[0].before.values
    for record in records:
        for slot, value in record.after.values.items():
            assert value is first[slot]


@pytest.mark.parametrize("kind", [_Norm, _Average, _LateScale])
def test_what_changes_is_kept_for_every_shard(kind):
    records, model = _records(kind()), kind().train()
    for record, shard in zip(records, _shards(), strict=True):
        for (module, name), value in record.before.values.items():
            assert torch.equal(model.get_buffer(f"{module}.{name}".lstrip(".")), value)
        model(shard["0"])


class _InPlaceThenAnew(_Norm):
    """Writes into a buffer for two shards and binds its name to new tensors ever after."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x) * self.scale.sin()
        if self.norm.num_batches_tracked < 3:
            self.scale.data.mul_(1.5)
        else:
            self.scale = self.scale * 0.7
        return z + (self.linear(x) * self.scale).cos()


class _HalvedTheSame(_Norm):
    """Scales by a tensor that it has bound anew, with the numbers that the one before had."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.mul_(0.5)  # which the graph of the shard before has saved
        self.scale = self.scale * 1.0
        return super().forward(x) * self.scale


class _HalvedTheSameBuffer(_HalvedTheSame):
    def __init__(self) -> None:
        super().__init__()
        scale = self.scale
        del self.scale
        self.register_buffer("scale", scale)


class _ThroughAView(_Norm):
    """Writes into a buffer through a view of it that is a plain attribute."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4, dtype=torch.float64))
        self.part = self.total[:2]

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        self.part.add_(z.detach().sum(0)[:2])
        return z * self.total.clone().cos()


def _early_samples_alone(z: Tensor) -> Tensor:
    """Leave some shards in the middle without a cotangent."""
    return (z[:6].sin().sum() * z[-6:].cos().sum()).tanh() + z[9:12].pow(3).mean()


def _naive(model: nn.Module, loss) -> dict[str, Tensor]:
    """Carry back shard by shard: a graph of all would read statistics of later ones."""
    with torch.no_grad():
        z = torch.cat([model(shard["0"]) for shard in _shards()]).requires_grad_()
    loss(z).backward()
    again = type(model)()
    for shard, cotangent in zip(_shards(), z.grad.split(3), strict=True):
        again(shard["0"]).backward(cotangent)
    return {name: p.grad for name, p in again.named_parameters()}


@pytest.mark.parametrize("loss", [torch.var, _early_samples_alone])
@pytest.mark.parametrize("retain", [0, 1500, 10**9])
@pytest.mark.parametrize(
    "kind",
    [
        _AverageUnseen,
        _Norm,
        _Reading,
        _ReadingUnseen,
        _ReadingEarly,
        _Average,
        _LateScale,
        _InPlaceThenAnew,
        _HalvedTheSame,
        _HalvedTheSameBuffer,
        _ThroughAView,
    ],
)
def test_the_gradient_is_that_of_naive_code(kind, retain, loss):
    model = kind()
    expected = _naive(model, loss)
    terms = {"mode": "train", "returns": ("grads", "buffers")}
    groups = [Group("z", _shards())]
    result: SetGradient = set_gradient(kind(), groups, Objective(loss), retain=retain, **terms)
    assert difference(result.grads, expected) <= TOLERANCE
    assert result.replay_difference == 0
    for name, buffer in model.named_buffers():
        assert torch.equal(result.buffers[name], buffer)
    nothing = set_gradient(kind(), groups, Objective(loss), retain=0, **terms)
    assert all(torch.equal(result.grads[n], nothing.grads[n]) for n in expected)


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
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert difference(result.grads, expected) <= TOLERANCE
