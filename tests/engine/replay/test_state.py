"""Snapshots of buffers, graphs in buffers, and parameters of unusual kinds."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import GraphInBuffer, Group, Objective, set_gradient, shard_stream
from gradbox_engine.model.state.buffer_numbers import BufferNumbers
from gradbox_engine.model.state.buffers import Buffers, Snapshot, packed, unpacked
from tests.engine.per_sample.zoo import Written
from tests.oracle import TOLERANCE, difference
from tests.stateful_models import Spiking, groups


def _shards(num: int = 4, width: int = 5) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {"0": torch.randn(3, width, generator=generator, dtype=torch.float64)} for _ in range(num)
    ]


def _spread(z: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(z, z).square()).mean()


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
    def rotating() -> nn.Module:
        turn = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128))
        return Written(lambda m, x: torch.view_as_real(x[:, :2] * m.turn).flatten(1), turn=turn)

    model = rotating()
    _spread(torch.cat([model(shard["0"]) for shard in _shards()])).backward()
    result = set_gradient(rotating(), [Group("z", _shards())], Objective(_spread))
    torch.testing.assert_close(result.grads["turn"], model.turn.grad)


def test_gradients_that_share_memory_are_not_mixed_up():
    # autograd hands both parameters the same gradient tensor, one of them as a view.
    model = Written(
        lambda m, x: (m.square.view(4) + m.flat) * x[:, :4],
        square=nn.Parameter(torch.zeros(2, 2, dtype=torch.float64)),
        flat=nn.Parameter(torch.zeros(4, dtype=torch.float64)),
    )
    shards = _shards()
    result = set_gradient(model, [Group("z", shards)], Objective(torch.sum))
    expected = torch.cat([shard["0"] for shard in shards])[:, :4].sum(0)
    torch.testing.assert_close(result.grads["flat"], expected)
    torch.testing.assert_close(result.grads["square"], expected.view(2, 2))


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
    first = BufferNumbers({0: torch.zeros(3), 1: torch.ones(3)}, versions={})
    second = BufferNumbers({0: torch.zeros(3), 1: torch.zeros(3)}, versions={})
    second.compare_later(first, list(second.values))
    own = dict(second.values)
    second.share()
    assert second.values[0] is first.values[0]
    assert second.values[1] is own[1]


def _with_buffers(**values: Tensor | None) -> nn.Module:
    model = nn.Linear(1, 1)
    for name, value in values.items():
        model.register_buffer(name, value)
    return model


def test_states_come_back_with_buffers_that_came_and_went():
    a, b = torch.zeros(3), torch.ones(3)
    model = _with_buffers(a=a, b=b)
    buffers = Buffers(model)
    states = [buffers.first]
    model.a = b + a
    del model.b
    model.register_buffer("c", torch.full((2,), 3.0))
    states.append(buffers.advance(states[-1]))
    model.register_buffer("b", None)
    model.c = model.a  # one tensor under two names
    states.append(buffers.advance(states[-1]))
    model._buffers.clear()
    states.append(buffers.advance(states[-1]))
    for state in states:
        buffers.restore(state)
        live = dict(model.named_buffers(remove_duplicate=False))
        values = {name: v for (_, name), v in state.values.items() if v is not None}
        assert live.keys() == values.keys()
        assert all(torch.equal(live[name], value) for name, value in values.items())
    buffers.restore(states[2])
    assert model.c is model.a


def test_states_come_back_from_a_checkpoint():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval())
    buffers = Buffers(model)
    states = [buffers.first]
    for _ in range(3):
        states.append(_after_a_pass(model, buffers, states[-1]))
    written = packed(states)
    assert len(written.tensors) == 9  # of one layer
    for before, after in zip(states, unpacked(written, buffers.first), strict=True):
        assert before.values.keys() == after.values.keys()
        assert all(torch.equal(after.values[slot], v) for slot, v in before.values.items())


def test_buffers_that_share_memory_still_do():
    model = _with_buffers(a=torch.zeros(4), b=torch.zeros(2))
    buffers = Buffers(model)
    model.a = torch.ones(4)
    model.b = model.a[:2]
    state = buffers.advance(buffers.first)
    for restored in (buffers.first, state):
        buffers.restore(restored)
    model.a.zero_()
    assert not model.b.any()


def test_states_are_freed_with_the_last_one_who_holds_them():
    model = nn.Sequential(nn.BatchNorm1d(3))
    model.kept = [torch.zeros(2)]
    gc.disable()  # what holds itself would wait for it, with all that it holds on a device
    try:
        buffers = Buffers(model)
        model(torch.randn(4, 3))
        model.kept[0].add_(1)
        state = buffers.advance(buffers.first)
        held = [weakref.ref(one) for one in (buffers, buffers.beyond, state)]
        del buffers, state
        assert [one() for one in held] == [None, None, None]
    finally:
        gc.enable()


def test_states_are_equal_where_all_values_are():
    model = _with_buffers(a=torch.zeros(3), b=None)
    buffers = Buffers(model)
    model.a = torch.zeros(3)
    assert buffers.advance(buffers.first).same_buffers(buffers.first)
    others: list[dict[str, Tensor | None]] = [
        {"a": torch.ones(3), "b": None}, {"a": torch.zeros(3), "b": torch.zeros(3)},
        {"a": torch.zeros(3)}, {"a": None, "b": None},
    ]  # fmt: skip
    for values in others:
        model._buffers.clear()
        model._buffers.update(values)
        assert not buffers.advance(buffers.first).same_buffers(buffers.first)


@pytest.mark.parametrize("retain", [0, 10**9])
def test_a_gradient_that_would_pass_between_shards_is_refused(retain: int) -> None:
    model = Spiking(lambda state: state.mean(0, keepdim=True))
    with pytest.raises(GraphInBuffer, match=r"'state'.*anew at the beginning"):
        set_gradient(model, groups(), Objective(_spread), mode="train", retain=retain)
    assert not model.state.requires_grad
