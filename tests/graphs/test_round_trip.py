"""What is traced, sent as JSON and built again has the value and the gradients of the original."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox.errors import GraphRefused
from gradbox.graphs.check import arguments_of, check_graph
from gradbox.graphs.schema import Graph
from gradbox.tracing.trace import Traced, trace
from gradbox_worker.interpreting.build import build
from tests.graphs.cases import CASES, Case, LearnedScale

TOLERANCE = 1e-12  # float64, the same operations in the same order


def rebuilt(traced: Traced) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """Send a graph through JSON; return the function and the leaves of its parameters."""
    graph = Graph.model_validate_json(traced.graph.model_dump_json())
    leaves = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in traced.parameters.items()
    }
    return build(graph, {**traced.tensors, **leaves}, device="cpu"), leaves


def value_and_gradients(
    function: Callable[..., Any], z: Tensor, inputs: dict[str, Tensor], leaves: dict[str, Tensor]
) -> dict[str, Tensor]:
    value = function(z * 1, **inputs)  # not a leaf, as the concatenation of outputs is not
    wanted = {"z": z, **leaves}
    wanted |= {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    found = torch.autograd.grad(value, list(wanted.values()))
    return {"value": value.detach(), **dict(zip(wanted, found, strict=True))}


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(
        float((left[name] - right[name]).abs().max() / left[name].abs().max().clamp(min=1e-30))
        for name in left
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_trace_agrees_with_the_function_for_every_number_of_samples(case: Case) -> None:
    function = case.make()
    traced = trace(function, positional=1, arguments=list(case.inputs))
    again, leaves = rebuilt(traced)
    for num in (6, 8, 14):
        z, inputs = case.tensors(num, seed=num)
        expected = value_and_gradients(function, z, inputs, traced.parameters)
        for _ in range(2):
            got = value_and_gradients(again, z, inputs, leaves)
            assert largest_difference(expected, got) <= TOLERANCE


def test_a_gradient_off_by_a_thousandth_is_seen() -> None:
    z, inputs = CASES[0].tensors(6)
    right = value_and_gradients(CASES[0].make(), z, inputs, {})
    wrong = {**right, "z": right["z"] * 1.001}
    assert largest_difference(right, wrong) > TOLERANCE


def test_a_module_keeps_its_state_and_names_its_parameters() -> None:
    loss = LearnedScale()
    traced = trace(loss, positional=1, arguments=["labels"])
    assert set(traced.parameters) == {"log_scale", "head.0.weight", "head.0.bias"}
    assert traced.parameters["log_scale"] is loss.log_scale
    assert traced.buffers == {"offset": loss.offset}
    assert loss.num_calls == 0
    assert all(type(value) is not torch.fx.Proxy for value in vars(loss).values())


def test_a_bound_method_and_a_frozen_parameter_are_traced() -> None:
    loss = LearnedScale()
    loss.head.requires_grad_(False)
    traced = trace(loss.forward, positional=1, arguments=["labels"])
    assert set(traced.parameters) == {"log_scale"}
    assert set(traced.buffers) == {"offset"}
    assert len(traced.constants) == 2


def test_groups_are_arguments_by_name() -> None:
    def loss(passages: Tensor, queries: Tensor, weight: float = 2.0) -> Tensor:
        return weight * (queries - 3 * passages).sum()

    traced = trace(loss, arguments=["queries", "passages"], options={"weight": 0.5})
    assert arguments_of(traced.graph) == ("queries", "passages")
    check_graph(traced.graph, (), positional=0, arguments=["passages", "queries"])
    again, _ = rebuilt(traced)
    one, two = torch.ones(2), torch.full((2,), 2.0)
    assert again(queries=one, passages=two) == loss(two, one, 0.5)


def test_arguments_and_tensors_are_left_as_they_were() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(9.0))
            self.mean: Tensor
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, z: Tensor) -> Tensor:
            with torch.no_grad():
                self.scale.clamp_(max=4.0)
                self.mean.mul_(0.9).add_(z.mean(0))
            z -= self.mean
            return (self.scale * z).sum()

    loss = Clamped()
    traced = trace(loss, positional=1)
    assert loss.scale == 9.0
    again, leaves = rebuilt(traced)
    z = torch.arange(6.0).reshape(2, 3).requires_grad_()
    first, second = again(z), again(z)
    expected = loss(z * 1)
    assert first == second == expected
    assert leaves["scale"] == 9.0
    assert torch.equal(z, torch.arange(6.0).reshape(2, 3))
    torch.autograd.grad(first, [z, leaves["scale"]])


def test_a_readout_reads_fields_and_returns_a_dict() -> None:
    def readout(output: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = inputs["attention_mask"].unsqueeze(-1)
        return {
            "mean": (output.last_hidden_state * mask).sum(1) / mask.sum(1),
            "first": output[0][:, 0],
        }

    traced = trace(readout, positional=2, structured=True)
    again, _ = rebuilt(traced)

    class Output(dict[Any, Tensor]):
        pass

    hidden = torch.randn(2, 3, 4)
    output = Output({"last_hidden_state": hidden, 0: hidden})
    got = again(output, {"attention_mask": torch.ones(2, 3)})
    torch.testing.assert_close(got["mean"], hidden.mean(1))
    torch.testing.assert_close(got["first"], hidden[:, 0])


@dataclass
class Found:
    z: Tensor
    others: tuple[Tensor, ...] = ()

    def size(self) -> int:
        return len(self.others)


def test_a_readout_reads_the_fields_of_a_dataclass_and_nothing_else_of_it() -> None:
    again, _ = rebuilt(
        trace(lambda output, inputs: output.z + output.others[0], positional=2, structured=True)
    )
    ones = torch.ones(2)
    assert torch.equal(again(Found(ones, (ones,)), {}), 2 * ones)
    of_a_method, _ = rebuilt(
        trace(lambda output, inputs: output.size, positional=2, structured=True)
    )
    with pytest.raises(TypeError, match="no field 'size'"):
        of_a_method(Found(ones), {})


@pytest.mark.parametrize("shape", [(2,), (2, 3, 4)])
def test_unpacking_takes_all_entries_or_fails(shape: tuple[int, ...]) -> None:
    def of_a_size(z: Tensor) -> Tensor:
        num, width = z.shape
        return z.sum() / (num * width)

    def of_a_tensor(z: Tensor) -> Tensor:
        left, right, last = z
        return (left * right + last).sum()

    def of_a_tuple(z: Tensor) -> Tensor:
        left, right, last = z.split(1)
        return (left * right + last).sum()

    for function in (of_a_size, of_a_tensor, of_a_tuple):
        with pytest.raises(ValueError, match="values to unpack"):
            function(torch.ones(shape))
        again, _ = rebuilt(trace(function, positional=1))
        with pytest.raises(AssertionError, match="entries were expected"):
            again(torch.ones(shape))
        assert again(torch.ones(3, 2)) == function(torch.ones(3, 2))


def test_fewer_pieces_than_were_asked_for_end_the_call() -> None:
    traced = trace(lambda z: torch.stack([part.sum() for part in z.chunk(4)]).var(), positional=1)
    loss = build(traced.graph, {}, device="cpu")
    assert loss(torch.arange(8.0)) == torch.tensor([1.0, 5, 9, 13]).var()
    with pytest.raises(AssertionError, match="4 entries were expected"):
        loss(torch.arange(5.0))  # in three pieces, the last of one entry


def test_a_readout_adds_the_last_layers_up() -> None:
    def readout(output: Any, inputs: dict[str, Tensor]) -> Any:
        return sum(output.hidden_states[-2:])

    traced = trace(readout, positional=2, structured=True)
    again = build(traced.graph, {}, device="cpu")
    layers = torch.arange(12.0).view(3, 4)
    assert torch.equal(again({"hidden_states": tuple(layers)}, {}), layers[1] + layers[2])
    with pytest.raises(AssertionError, match="2 entries were expected"):
        again({"hidden_states": tuple(layers[:1])}, {})


def test_a_mapping_is_not_unpacked() -> None:
    def readout(output: Any) -> Tensor:
        first, second = output
        return first + second

    again, _ = rebuilt(trace(readout, positional=1, structured=True))
    with pytest.raises(GraphRefused, match=r"builtins\.len on a dict"):
        again({"a": torch.ones(1), "b": torch.ones(1)})


def test_a_caller_without_gradients_gets_none() -> None:
    def loss(z: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = z * 2
        return (frozen * z).sum()

    again, _ = rebuilt(trace(loss, positional=1))
    with torch.no_grad():
        assert not again(torch.ones(2, requires_grad=True)).requires_grad
    assert torch.is_grad_enabled()


def test_devices_of_the_author_become_the_device_of_the_job() -> None:
    def loss(z: Tensor) -> Tensor:
        mask = torch.eye(z.shape[0], device="cuda:3") + torch.ones(1).cuda()
        return (z.to("cuda:3").cpu().to(torch.device("cuda"), torch.float64) * mask).sum()

    traced = trace(loss, positional=1)
    assert "cuda" not in traced.graph.model_dump_json()
    function = build(traced.graph, {}, device="meta")
    assert function(torch.ones(2, 2, device="meta")).device.type == "meta"


def test_a_real_tensor_makes_others_of_a_size_that_is_not_known_yet() -> None:
    scale = torch.ones(2)

    def loss(z: Tensor) -> Tensor:
        return (z + scale.new_full((z.shape[0], 1), 0.5)).sum() + scale.new_zeros((1,)).sum()

    z = torch.arange(6.0).reshape(3, 2)
    traced = trace(loss, positional=1)
    assert build(traced.graph, traced.tensors, device="cpu")(z) == loss(z)


def test_two_functions_of_one_graph_keep_their_own_tensors() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, z: Tensor) -> Tensor:
            return (z * self.scale).sum()

    traced = trace(Scaled(), positional=1)
    one, own = rebuilt(traced)
    other, _ = rebuilt(traced)
    with torch.no_grad():
        own["scale"].fill_(3.0)
    z = torch.ones(4)
    assert (one(z), other(z)) == (12.0, 8.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_complex_constant_has_all_digits_of_the_dtype_that_it_gets(dtype: torch.dtype) -> None:
    def loss(z: Tensor) -> Tensor:
        wave = torch.complex(z, z)
        return (wave * torch.tensor([0.1 + 0.7j, 0.3j], dtype=wave.dtype)).abs().sum()

    again, _ = rebuilt(trace(loss, positional=1))
    z = torch.ones(2, dtype=dtype)
    assert again(z) == loss(z)
    assert all(not value.is_complex() for value in trace(loss, positional=1).tensors.values())
