"""State that is hard to put back, and parameters of unusual kinds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, set_gradient, shard_stream
from gradbox_engine.model.state.buffers import Buffers
from gradbox_engine.model.state.model_state import ModelState
from gradbox_engine.model.state.snapshots import Snapshot, packed, unpacked
from tests.oracle import TOLERANCE, difference


def _shards(num: int = 4, width: int = 5) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {"0": torch.randn(3, width, generator=generator, dtype=torch.float64)} for _ in range(num)
    ]


def _spread(z: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(z, z).square()).mean()


class _Stateful(nn.Module):
    """A linear layer whose output is shifted by what `state` returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return z + self.state(z.detach())

    def state(self, z: Tensor) -> Tensor:
        raise NotImplementedError


class _Swapping(_Stateful):
    """Two buffers that trade places; one of them is also written to."""

    a: Tensor
    b: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(3).double())
        self.register_buffer("b", torch.ones(3).double())

    def state(self, z: Tensor) -> Tensor:
        self.a, self.b = self.b, self.a
        self.a.mul_(0.5).add_(z.mean(0))
        return self.a - 2 * self.b


class _Turning(_Stateful):
    """A buffer that changes its values with each call, and with every second its shape in place."""

    table: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6.0).double().view(2, 3))
        self.register_buffer("calls", torch.zeros(()))

    def state(self, z: Tensor) -> Tensor:
        shift = self.table[0, :2].repeat(2)[:3]
        self.calls += 1
        table = 0.5 * self.table + z.mean()
        self.table.data = table.t() if self.calls % 2 == 0 else table
        return shift


class _Growing(_Stateful):
    """A queue that gets longer with each call."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(1, 3).double())

    def state(self, z: Tensor) -> Tensor:
        self.queue = torch.cat([self.queue, z.mean(0, keepdim=True)])
        return self.queue.sum(0)


class _Late(_Stateful):
    """Registers a buffer in its first call, and fills one that was None."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", None)

    def state(self, z: Tensor) -> Tensor:
        if not hasattr(self, "calls"):
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls += 1
        self.sum = z.mean(0) if self.sum is None else self.sum + z.mean(0)
        return self.sum / self.calls


class _Shared(_Stateful):
    """One buffer under two names, and a plain attribute that is the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3).double())
        self.inner = nn.Module()
        self.inner.register_buffer("mean", self.mean)
        self.plain = [self.mean]

    def state(self, z: Tensor) -> Tensor:
        self.plain[0].mul_(0.5).add_(z.mean(0))
        return self.mean + self.inner.mean


class _ByView(_Stateful):
    """Writes to its buffer through a view that was made long ago."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("both", torch.zeros(2, 3).double())
        self.half = [self.both[0]]

    def state(self, z: Tensor) -> Tensor:
        self.half[0].mul_(0.5).add_(z.mean(0))
        return self.both.sum(0)


class _Holey(_Stateful):
    """A buffer in which NaN stands for nothing yet."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("known", torch.full((4, 3), torch.nan).double())
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def state(self, z: Tensor) -> Tensor:
        self.known[self.place % 4] = z.mean(0)
        self.place += 1
        return self.known.nan_to_num().sum(0)


@pytest.mark.parametrize("retain", [0, 700, 10**9])
@pytest.mark.parametrize("kind", [_Swapping, _Turning, _Growing, _Late, _Shared, _ByView, _Holey])
def test_the_gradient_and_the_buffers_are_those_of_naive_code(kind, retain):
    model = kind()
    zs = [model(shard["0"]) for shard in _shards()]
    _spread(torch.cat(zs)).backward()
    job = kind()
    before = {name: (id(b), b.clone()) for name, b in job.named_buffers()}
    result = set_gradient(
        job, [Group("z", _shards())], Objective(_spread), retain=retain, returns=("buffers",)
    )
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert difference(result.grads, expected) <= TOLERANCE
    assert result.replay_difference == 0
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(result.buffers[name], buffer, equal_nan=True)
    after = dict(job.named_buffers())
    assert after.keys() == before.keys()
    for name, (identity, value) in before.items():
        assert id(after[name]) == identity
        torch.testing.assert_close(after[name], value, equal_nan=True, rtol=0, atol=0)


def test_snapshots_share_what_did_not_change():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval())
    buffers = Buffers(model)
    model(torch.randn(4, 3))
    second = buffers.advance(buffers.first)
    shared = {slot for slot, value in second.values.items() if value is buffers.first.values[slot]}
    assert shared == {("1", "running_mean"), ("1", "running_var"), ("1", "num_batches_tracked")}


def test_snapshots_keep_what_changes_in_one_tensor():
    model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(5)))
    for layer in model:
        nn.init.ones_(layer.bias)  # else the mean that the next one sees is now and then zero
    buffers = Buffers(model)
    second, third = (_after_a_pass(model, buffers, buffers.first) for _ in range(2))
    floats = [value for value in third.values.values() if value.is_floating_point()]
    assert len({value.untyped_storage().data_ptr() for value in floats}) == 1
    live = dict(model.named_buffers())
    buffers.restore(second)
    assert any(not torch.equal(third.values[slot], second.values[slot]) for slot in second.values)
    buffers.restore(third)
    assert all(torch.equal(live[".".join(slot)], v) for slot, v in third.values.items())


def _after_a_pass(model: nn.Module, buffers: Buffers, before: Snapshot) -> Snapshot:
    model(torch.randn(4, 3))
    return buffers.advance(before)


def test_sparse_gradients_come_back_dense():
    def build(*, sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(7, 3, sparse=sparse), nn.Flatten()).double()

    shards = [{"0": torch.tensor([[1, 2], [2, 5]])}, {"0": torch.tensor([[2, 2]])}]
    sparse, dense = (
        set_gradient(build(sparse=kind), [Group("z", shards)], Objective(_spread)).grads
        for kind in (True, False)
    )
    assert difference(sparse, dense) <= TOLERANCE


def test_complex_parameters_have_gradients():
    class Rotating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_real(x[:, :2] * self.turn).flatten(1)

    model = Rotating()
    _spread(torch.cat([model(shard["0"]) for shard in _shards()])).backward()
    result = set_gradient(Rotating(), [Group("z", _shards())], Objective(_spread))
    torch.testing.assert_close(result.grads["turn"], model.turn.grad)


def test_gradients_that_share_memory_are_not_mixed_up():
    class Sum(nn.Module):
        """autograd hands both parameters the same gradient tensor, one of them as a view."""

        def __init__(self) -> None:
            super().__init__()
            self.square = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
            self.flat = nn.Parameter(torch.zeros(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.square.view(4) + self.flat) * x[:, :4]

    shards = _shards()
    result = set_gradient(Sum(), [Group("z", shards)], Objective(torch.sum))
    expected = torch.cat([shard["0"] for shard in shards])[:, :4].sum(0)
    torch.testing.assert_close(result.grads["flat"], expected)
    torch.testing.assert_close(result.grads["square"], expected.view(2, 2))


def test_a_models_attributes_are_put_back():
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3).double()
            self.calls = 0
            self.history: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            z = self.linear(x)
            self.history.append(z)
            self.latest = z
            return z

    model = Caching()
    set_gradient(model, [Group("z", _shards())], Objective(_spread))
    assert (model.calls, model.history) == (0, [])
    assert not hasattr(model, "latest")


def test_a_job_inside_a_stream_does_not_disturb_it():
    with shard_stream(0, 0, 0):
        expected = torch.rand(3)
    with shard_stream(0, 0, 0):
        set_gradient(nn.Linear(5, 3).double(), [Group("z", _shards())], Objective(_spread))
        # The layer's initial weights were drawn from the stream as well.
        drawn = torch.rand(3)
    with shard_stream(0, 0, 0):
        nn.Linear(5, 3)
        assert torch.equal(torch.rand(3), drawn)
    assert not torch.equal(drawn, expected)


def test_a_comparison_on_the_device_may_be_looked_at_later():
    first = Snapshot({("", "a"): torch.zeros(3), ("", "b"): torch.ones(3)}, versions={})
    second = Snapshot({("", "a"): torch.zeros(3), ("", "b"): torch.zeros(3)}, versions={})
    second.compare_later(first, list(second.values))
    own = dict(second.values)
    second.share()
    assert second.values["", "a"] is first.values["", "a"]
    assert second.values["", "b"] is own["", "b"]


def _snapshot(**values: Tensor | None) -> Snapshot:
    return Snapshot({("", name): value for name, value in values.items()}, versions={})


def test_states_come_back_from_a_checkpoint_with_buffers_that_came_and_went():
    a, b = torch.zeros(3), torch.ones(3)
    model = ModelState(nn.Linear(1, 1))
    states = [_snapshot(a=a, b=b), _snapshot(a=b, c=a), _snapshot(a=b, b=None, c=b), _snapshot()]
    found = unpacked(packed(states, model), states[0], model)
    assert [state.values for state in found] == [state.values for state in states]


def test_states_are_equal_where_all_values_are():
    state = _snapshot(a=torch.zeros(3), b=None)
    assert state.equals(_snapshot(a=torch.zeros(3), b=None))
    others = [{"a": torch.ones(3), "b": None}, {"a": torch.zeros(3), "b": torch.zeros(3)}]
    for other in [*others, {"a": torch.zeros(3)}, {"a": None, "b": None}]:
        assert not state.equals(_snapshot(**other))
