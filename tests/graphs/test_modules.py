"""Losses that hold torch's own modules: value, gradients and buffers are those of the module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradbox.errors import GraphRefused, UntraceableLoss
from gradbox.tracing.trace import Traced, trace
from gradbox_worker.interpreting.build import GraphFunction, build
from tests.graphs.module_losses import Attention, D, N, Twice
from tests.graphs.modules import ABSTRACT, RECORDED, REFUSED

TOLERANCE = 1e-12
GRAPHS_PAGE = Path(__file__).parents[2] / "docs" / "graphs.md"


class Loss(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, z: Tensor) -> Tensor:
        found = self.module(z)
        return (found * found.sin()).sum() + found.mean()


def drawn() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(N, D, generator=generator, dtype=torch.float64).requires_grad_()


def dense(gradient: Tensor | None, of: Tensor) -> Tensor:
    """A parameter that the loss does not read has the gradient 0."""
    if gradient is None:
        return torch.zeros_like(of)
    return gradient.to_dense() if gradient.is_sparse else gradient


def on_the_box(traced: Traced) -> GraphFunction:
    return build(traced.graph, traced.tensors, device="cpu", buffers=[*traced.buffers])


@pytest.mark.parametrize("name", RECORDED)
def test_a_module_in_a_loss_is_exact(name: str) -> None:
    torch.manual_seed(0)
    loss, z = Loss(RECORDED[name]()).double(), drawn()
    before = {key: value.clone() for key, value in loss.state_dict().items()}
    traced = trace(loss, positional=1)
    function = on_the_box(traced)
    parameters = dict(loss.named_parameters())
    assert traced.parameters.keys() == parameters.keys()
    value = function(z)
    function(z)  # a second call begins where the first began
    gradients = torch.autograd.grad(value, [z, *parameters.values()], allow_unused=True)
    state = loss.state_dict()
    assert all(torch.equal(state[key], was) for key, was in before.items())

    expected = loss(z)
    naive = torch.autograd.grad(expected, [z, *parameters.values()], allow_unused=True)
    torch.testing.assert_close(value, expected, rtol=TOLERANCE, atol=TOLERANCE)
    for found, right, of in zip(gradients, naive, [z, *parameters.values()], strict=True):
        found, right = (dense(grad, of) for grad in (found, right))
        torch.testing.assert_close(found, right, rtol=TOLERANCE, atol=TOLERANCE)
    for buffer, right in loss.named_buffers():
        left = function.buffers[buffer] if buffer in function.buffers else before[buffer]
        torch.testing.assert_close(left, right, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_no_graph_can_hold_is_refused_by_its_name(name: str) -> None:
    make, instead = REFUSED[name]
    with pytest.raises(UntraceableLoss) as refused:
        trace(Loss(make()), positional=1)
    assert f"nn.{name}" in str(refused.value)
    assert instead in str(refused.value)


def test_every_module_of_torch_is_recorded_or_refused() -> None:
    every = {
        name
        for name, kind in vars(nn).items()
        if isinstance(kind, type) and issubclass(kind, nn.Module)
    }
    held = {type(module).__name__ for make in RECORDED.values() for module in make().modules()}
    assert every - held == (REFUSED.keys() | ABSTRACT) - held
    assert REFUSED.keys() <= every


def test_the_page_names_what_is_refused() -> None:
    table = GRAPHS_PAGE.read_text().split("| refused module |")[1].split("\n\n")[0]
    named = {
        name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert named == REFUSED.keys() | {"LinearCrossEntropyLoss"}  # new in torch 2.13


def test_a_lazy_module_that_was_called_is_the_module_that_it_became() -> None:
    lazy = nn.LazyBatchNorm1d()
    lazy(torch.ones(2, D))
    trace(Loss(lazy), positional=1)


def test_buffers_hold_no_graph() -> None:
    function = on_the_box(trace(Twice().double(), positional=1))
    function(drawn())
    assert function.buffers["last.num_batches_tracked"] == 2
    assert not any(buffer.requires_grad for buffer in function.buffers.values())


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.BatchNorm1d(D), "BatchNorm1d: expected 2D or 3D input"),
        (nn.InstanceNorm1d(D), "InstanceNorm1d: expected 3D input"),
        (nn.BatchNorm2d(D), r"if input.dim\(\) != 4"),
    ],
)
def test_an_argument_of_another_rank_is_refused_on_the_box(module: nn.Module, said: str) -> None:
    module.requires_grad_(False)
    function = on_the_box(trace(lambda z: module(z.reshape(2, 1, 1, 1, 3, D)).sum(), positional=1))
    with pytest.raises(AssertionError, match=said):
        function(drawn())


def test_attention_that_drops_weights_is_random() -> None:
    with pytest.raises(UntraceableLoss, match="loss_inputs"):
        trace(Attention(dropout=0.1), positional=1)
    with pytest.raises(UntraceableLoss, match="loss_inputs"):
        trace(lambda z: F.scaled_dot_product_attention(z, z, z, None, 0.1).sum(), positional=1)


def test_attention_has_a_second_derivative() -> None:
    def loss(z: Tensor) -> Tensor:
        q = z[None]
        return F.scaled_dot_product_attention(q, q, q).square().sum()

    traced = trace(loss, positional=1)
    function, z = on_the_box(traced), drawn()
    (first,) = torch.autograd.grad(function(z), z, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), z)
    assert second.abs().sum() > 0


def test_modules_behave_as_before_while_another_function_is_traced() -> None:
    norm = nn.BatchNorm1d(D).eval()
    constant = norm(torch.ones(2, D)).detach()
    patched = [nn.MultiheadAttention.forward, nn.BatchNorm1d._check_input_dim]

    def loss(z: Tensor) -> Tensor:
        return (z * constant.sum()).sum()

    trace(loss, positional=1)
    assert [nn.MultiheadAttention.forward, nn.BatchNorm1d._check_input_dim] == patched
    with pytest.raises(ValueError, match="2D or 3D"):
        norm(torch.ones(D))


def test_a_mask_of_the_wrong_shape_reaches_no_kernel() -> None:
    def loss(z: Tensor) -> Tensor:
        q = z[None, None]
        return F.scaled_dot_product_attention(q, q, q, torch.zeros(2, 2, dtype=z.dtype)).sum()

    function = on_the_box(trace(loss, positional=1))
    with pytest.raises((RuntimeError, GraphRefused)):
        function(drawn())
