"""What is odd in a model never shows in its gradient, whatever graphs are kept, job after job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradbox_engine import Group, Objective, SetGradient, set_gradient, shard_stream
from gradbox_engine.errors import GraphInBuffer, ModelCallFailed
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.prepared import prepared
from gradbox_engine.model.wrt import select
from gradbox_engine.replay.first_pass import GraphCalls, first_pass
from gradbox_engine.replay.retention import GraphBudget
from gradbox_engine.replay.shard_record import ShardRecord
from gradbox_engine.requests import CallOptions, Penalty, Silent
from tests.device import REPLAYED
from tests.engine.drawn_modules import Reversed
from tests.engine.replay.odd_models import ODD, ByAutograd, ByFunc, Norm, Odd, rows
from tests.oracle import TOLERANCE, difference
from tests.stateful_models import Reversing, groups, loss, loss_of_some, naive_answer

SEED = 5
Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Naive:
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def naive(odd: Odd, loss: Loss) -> Naive:
    """Carry back shard by shard: a graph of all would read what later shards left."""
    built, shards = odd.plain or odd.model, odd.shards()

    def outputs(model: nn.Module, index: int) -> Tensor:
        with shard_stream(SEED, 0, index):
            z: Tensor = model(shards[index]["0"])
        return z

    model = built().train()
    z = torch.cat([outputs(model, index).detach() for index in range(len(shards))])
    loss(z.requires_grad_()).backward()
    assert z.grad is not None
    model = built().train()
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for index, cotangent in enumerate(z.grad.split([len(shard["0"]) for shard in shards])):
        found = outputs(model, index)
        model.zero_grad()
        found.backward(cotangent)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name] += parameter.grad.to_dense()
    return Naive(sums, dict(model.named_buffers()))


def spread(z: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(z, z).square()).mean()


def of_some(z: Tensor) -> Tensor:
    """Leave some shards in the middle without a cotangent."""
    return (z[:6].sin().sum() * z[-6:].cos().sum()).tanh() + z[9:12].pow(3).mean()


def _leaves(model: nn.Module) -> list[Tensor]:
    return [x for x in vars(model).values() if isinstance(x, Tensor)]


def _dense(x: Tensor) -> Tensor:
    return x.to_dense() if x.layout != torch.strided else x


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:Using backward")
@pytest.mark.parametrize("loss", [spread, of_some])
@pytest.mark.parametrize("name", ODD)
def test_the_gradient_is_that_of_naive_code(name: str, loss: Loss) -> None:
    odd = ODD[name]
    expected = naive(odd, loss)

    def answer(model: nn.Module, retain: Any) -> SetGradient:
        group = Group("z", odd.shards())
        return set_gradient(
            model, [group], Objective(loss), mode="train", seed=SEED, retain=retain,
            returns=("grads", "buffers"),
        )  # fmt: skip

    model = odd.model().eval()
    before = [(n, _dense(x).clone()) for n, x in model.state_dict().items()]
    plain = [x.detach().clone() for x in _leaves(model)]
    first = answer(model, 0)
    assert difference(first.grads, expected.grads) <= TOLERANCE
    for retain in (1500, 20_000, 10**9, "auto", 0) if loss is spread else (1500, 10**9):
        result = answer(model, retain)
        assert result.replay_difference <= REPLAYED
        assert result.loss == first.loss
        assert all(torch.equal(result.grads[n], first.grads[n]) for n in first.grads)
        for n, buffer in expected.buffers.items():
            assert torch.equal(_dense(result.buffers[n]), _dense(buffer))
    assert not model.training
    assert all(torch.equal(_dense(model.state_dict()[n]), x) for n, x in before)
    assert all(torch.equal(x, y) for x, y in zip(_leaves(model), plain, strict=False))
    assert all(leaf.grad is None for leaf in _leaves(model) if leaf.is_leaf)


def exp_of_pairs(z: Tensor) -> Tensor:
    return (z @ z.T).exp().mean()


def _counted(m: Any, _: Tensor) -> float:
    m.kept = SimpleNamespace(calls=m.kept.calls + 1)
    return float(m.kept.calls)


class _CountingInBlock(Reversing):
    """Counts within a block that its backward pass calls once more."""

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = checkpoint(self.block, self.linear(x), use_reentrant=True)
        return z.tanh()

    def block(self, z: Tensor) -> Tensor:
        found: Tensor = Reversed.apply(z, 0.5 * self.strength(self, z))
        return found


def _model(kind: type[Reversing], strength: Callable[[Any, Tensor], float]) -> Reversing:
    return kind(strength, kept=lambda: SimpleNamespace(calls=0))


@pytest.mark.parametrize("retain", [0, 1000, 10**9])
@pytest.mark.parametrize("of", [loss, loss_of_some])
def test_what_a_backward_pass_counts_is_not_found_by_the_next_shard(retain, of):
    job = _model(_CountingInBlock, _counted)
    found = set_gradient(job, groups(), Objective(of), mode="train", retain=retain)
    later = naive_answer(lambda: _model(Reversing, lambda m, z: _counted(m, z) + 1), of)
    assert difference(found.grads, later.grads) <= TOLERANCE  # what that call finds


@pytest.mark.parametrize("retain", [0, 10**9])
@pytest.mark.parametrize("kind", [ByAutograd, ByFunc])
def test_graphs_under_a_transform_cannot_be_measured_so_all_but_the_last_one_go(kind, retain):
    calls, called = [], kind()
    called.register_forward_pre_hook(lambda *_: calls.append(1))
    group = Group("z", rows())
    result = set_gradient(called, [group], Objective(exp_of_pairs), mode="train", retain=retain)
    kept_all = retain > 0 and kind is ByAutograd
    assert (result.retained, result.replayed) == ((6, 0) if kept_all else (1, 5))
    tried_in_vain = retain > 0 and not kept_all  # once, by the first shard
    assert len(calls) == 6 + result.replayed + tried_in_vain


class _Backward(nn.Module):
    """Calls `backward` in its forward pass, which leaves gradients at parameters and inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.energy = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.energy(x)
        h.square().sum().backward(retain_graph=True)
        return h.tanh()


@pytest.mark.parametrize("retain", [0, 10**9])
def test_gradients_that_the_forward_pass_left_do_not_count(retain):
    group = Group("z", rows())
    found = set_gradient(
        _Backward(), [group], Objective(exp_of_pairs), wrt=["*", "inputs.0"], retain=retain
    )
    plain, xs = _Backward().energy, [shard["0"].requires_grad_() for shard in rows()]
    exp_of_pairs(torch.cat([plain(x).tanh() for x in xs])).backward()
    expected = {f"energy.{name}": p.grad for name, p in plain.named_parameters()}
    assert difference(found.grads, expected) <= TOLERANCE
    inputs = dict(enumerate(found.input_grads["z"]["0"]))
    assert difference(inputs, {i: x.grad for i, x in enumerate(xs)}) <= TOLERANCE


class _Caching(Norm):
    """Computes something of its weight in its first call and uses it ever after."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_of_weight: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_of_weight is None:
            self.norm_of_weight = self.linear.weight.norm()
        return super().forward(x) * self.norm_of_weight


def test_a_tensor_kept_with_its_graph_is_an_error_and_never_a_missing_gradient():
    model = _Caching()
    for _ in range(3):
        with pytest.raises(ModelCallFailed):
            set_gradient(model, [Group("z", rows())], Objective(spread), mode="train")


class _Remembering(Norm):
    """Leaves its mean in a buffer, with its graph where the first entry is large."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x) + self.memory
        self.memory = z.mean(0) if x[0, 0] > 1 else z.mean(0).detach()
        return z


def test_a_graph_in_a_buffer_is_refused_in_later_jobs_too():
    shards = rows()
    for shard in shards:
        shard["0"][0, 0] = 0
    model = _Remembering()
    harmless = [Group("z", shards)]
    for _ in range(2):
        set_gradient(model, harmless, Objective(spread), mode="train")
    shards[0]["0"][0, 0] = 2
    with pytest.raises(GraphInBuffer, match="memory"):
        set_gradient(model, harmless, Objective(spread), mode="train")


class _ReadingBeside(Norm):
    """Reads them for something that z does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(5, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        self.beside(x * self.norm.running_var.mean())
        return super().forward(x)


def _records(model: nn.Module, mode: str = "train") -> list[ShardRecord]:
    groups = [Group("z", rows())]
    positions = [Position(0, shard) for shard in range(len(rows()))]
    with prepared(model, groups, select(model, None), CallOptions(mode=mode)) as ready:
        records: list[ShardRecord] = []
        calls = GraphCalls(ready, len(rows()), budget=GraphBudget(0))
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
    for record, shard in zip(records, rows(), strict=True):
        for (module, name), value in record.before.values.items():
            assert torch.equal(model.get_buffer(f"{module}.{name}".lstrip(".")), value)
        model(shard["0"])


def test_a_penalty_on_what_z_does_not_show_sees_its_own_statistics():
    def penalty(tap: Tensor) -> Tensor:
        return tap.square().mean()

    model, taps = _ReadingBeside(), []
    model.beside.register_forward_hook(lambda _module, _inputs, output: taps.append(output))
    z = torch.cat([model(shard["0"]) for shard in rows()])
    (z.sin().sum() + sum(map(penalty, taps))).backward()
    result = set_gradient(
        _ReadingBeside(),
        [Group("z", rows())],
        Objective(lambda z: z.sin().sum()),
        mode="train",
        penalties=[Penalty("beside", penalty)],
    )
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert difference({n: result.grads[n] for n in expected}, expected) <= TOLERANCE
