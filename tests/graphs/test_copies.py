"""A graph that writes in place leaves everybody else's tensors alone, and loses no gradient."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradbox.errors import UntraceableLoss
from gradbox.tracing.trace import trace
from gradbox_worker.interpreting.build import build
from tests.graphs.test_refused import NODE_Z, call, graph_of

Pair = namedtuple("Pair", "first second")


class ModelOutput(OrderedDict[str, Any]):
    """Is read by name and by place, as those of transformers are."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


def rebuilt(function: Callable[..., Any], *, positional: int = 1) -> Callable[..., Any]:
    traced = trace(function, positional=positional, structured=True)
    return build(traced.graph, traced.tensors, device="cpu")


HELD: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "mapping": (lambda t: {"a": t}, lambda o: o["a"]),
    "field of a mapping": (lambda t: {"a": t}, lambda o: o.a),
    "model output by place": (lambda t: ModelOutput(a=t), lambda o: o[0]),
    "slice of a model output": (lambda t: ModelOutput(b=t, a=t), lambda o: o[:1][0]),
    "list": (lambda t: [t], lambda o: o[0]),
    "tuple in a list": (lambda t: [(1, t)], lambda o: o[0][1]),
    "named tuple": (lambda t: Pair(1, t), lambda o: o.second),
    "what torch returns": (lambda t: torch.return_types.max([t, t]), lambda o: o.values),
    "tuple in a mapping": (lambda t: {"a": (t, t)}, lambda o: o["a"][-1]),
    "view of a list's entry": (lambda t: [t, t], lambda o: torch.atleast_1d(o)[0]),
}


@pytest.mark.parametrize("holder", HELD)
def test_a_readout_cannot_write_to_what_a_model_returned(holder: str) -> None:
    hold, read = HELD[holder]
    parameter = nn.Parameter(torch.ones(3))

    def readout(output: Any, inputs: Any) -> Tensor:
        with torch.no_grad():
            read(output).fill_(100.0)
            read(inputs).mul_(2.0)
        return read(output) + read(inputs)

    function = rebuilt(readout, positional=2)
    other = torch.ones(3)
    for _ in range(2):
        written = function(hold(parameter), hold(other))
        assert torch.equal(written, torch.full((3,), 102.0))
    assert torch.equal(parameter, torch.ones(3))
    assert torch.equal(other, torch.ones(3))


def test_a_loss_may_write_to_an_entry_that_is_a_leaf() -> None:
    def loss(z: Any) -> Tensor:
        a = z["a"]
        a.clamp_(min=0)
        return (a * z["b"]).sum()

    leaf = torch.tensor([-1.0, 2.0], requires_grad=True)
    rebuilt(loss)({"a": leaf, "b": torch.tensor([3.0, 4.0])}).backward()
    assert torch.equal(leaf.grad, torch.tensor([0.0, 4.0]))


def test_a_readout_that_writes_may_return_all_that_the_model_returned() -> None:
    def readout(output: Any) -> Any:
        output["a"].mul_(2)
        return output

    result = rebuilt(readout)({"a": torch.ones(1), "b": torch.ones(1)})
    assert type(result) is dict
    assert result == {"a": torch.tensor([2.0]), "b": torch.ones(1)}


@pytest.mark.parametrize(
    "write",
    [
        lambda c: F.leaky_relu(c, 0.1, True),
        lambda c: F.relu(c, True),
        lambda c: F.threshold(c, 0.0, 0.5, inplace=True),
        nn.ELU(inplace=True),
    ],
)
def test_inplace_is_seen_by_position_too(write: Callable[[Tensor], Tensor]) -> None:
    constant, leaf = torch.tensor([-1.0, 2.0]), torch.tensor([-3.0, 1.0], requires_grad=True)
    function = rebuilt(lambda z: (write(z) * write(constant)).sum())
    expected = (write(leaf * 1) * write(constant.clone())).sum()
    for _ in range(2):
        assert function(leaf) == expected
    assert torch.equal(constant, torch.tensor([-1.0, 2.0]))


def test_an_inplace_that_is_computed_may_be_true() -> None:
    graph = graph_of(
        call("operator.eq", 1, 1, name="a"),
        call("torch.nn.functional.relu", NODE_Z, {"node": "a"}),
    )
    z = torch.tensor([-1.0])
    assert build(graph, {}, device="cpu")(z) == 0
    assert z == -1


def test_out_by_position_is_refused_with_the_line() -> None:
    kept = torch.zeros(2, 3)

    def loss(z: Tensor) -> Tensor:
        F.normalize(z, 2.0, 1, 1e-12, kept)  # here
        return (z * kept).sum()

    with pytest.raises(UntraceableLoss, match=r"# here.*out="):
        rebuilt(loss)


class MovingMean(nn.Module):
    """A trainable scale read right after a region without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, z: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(z.mean(0), alpha=0.1)
        return (z * self.scale - self.mean).square().sum()


class ReadWithoutGradients(MovingMean):
    """A trainable scale that is first read inside such a region."""

    def forward(self, z: Tensor) -> Tensor:
        with torch.no_grad():
            length = z.max() + self.scale.norm()
        y = z / length
        y.mul_(self.scale)
        return y.sum()


@pytest.mark.parametrize("kind", [MovingMean, ReadWithoutGradients])
def test_a_parameter_first_read_without_gradients_keeps_its_own(kind: type[MovingMean]) -> None:
    loss = kind()
    z = torch.arange(6.0).reshape(3, 2)
    (got,) = torch.autograd.grad(rebuilt(loss)(z), [loss.scale])
    (expected,) = torch.autograd.grad(loss(z), [loss.scale])
    assert expected.any()
    assert torch.equal(got, expected)


def test_an_entry_first_read_without_gradients_keeps_its_own() -> None:
    def loss(z: Any) -> Tensor:
        with torch.no_grad():
            top = z["a"].max()
        y = z["a"] / top
        y += 1
        return y.square().sum()

    a = torch.tensor([1.0, 2.0], requires_grad=True)
    (got,) = torch.autograd.grad(rebuilt(loss)({"a": a}), [a])
    (expected,) = torch.autograd.grad(loss({"a": a}), [a])
    assert torch.equal(got, expected)
