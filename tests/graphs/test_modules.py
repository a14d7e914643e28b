"""Losses that hold torch's own modules: value, gradients and buffers are those of the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradbox.errors import GraphRefused, UntraceableLoss
from gradbox.interpreting.build import GraphFunction, build
from gradbox.tracing.trace import Traced, trace

TOLERANCE = 1e-12
N, D = 6, 8


class Attention(nn.Module):
    """Z attends to itself, as one sequence without a batch dimension or as a batch of one."""

    def __init__(self, *, batched: bool = True, mask: Tensor | None = None, **given: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, **given)
        self.batched = batched
        self.mask = mask

    def forward(self, z: Tensor) -> Tensor:
        z = z[None] if self.batched else z
        output, weights = self.attention(z, z, z, key_padding_mask=self.mask)
        return output.sum(0) + weights.square().sum()


class Twice(nn.Module):
    """One projector on two views of Z, as Barlow Twins has it: its statistics move twice."""

    def __init__(self) -> None:
        super().__init__()
        self.projector = nn.Sequential(
            nn.Linear(D, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, 3)
        )
        self.last = nn.BatchNorm1d(3, affine=False)

    def forward(self, z: Tensor) -> Tensor:
        left, right = (self.last(self.projector(view)) for view in (z, z.flip(1)))
        return left.T @ right / z.shape[0]


class Recurrence(nn.Module):
    """Z as sequences of two steps, and what the layer ends with."""

    def __init__(self, layer: nn.RNNBase, *, begin: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.begin = begin

    def forward(self, z: Tensor) -> Tensor:
        steps = z.unflatten(1, (2, 4))
        if not self.begin:
            output, state = self.layer(steps)
        else:
            first = z[None, :2, :3].contiguous()
            output, state = self.layer(steps, (first, first.sin()))
        ends = state if isinstance(self.layer, nn.LSTM) else (state,)
        return output.sum() + sum(end.square().sum() for end in ends)


class Fused(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        q = z.unflatten(1, (2, 4)).transpose(0, 1)
        return F.scaled_dot_product_attention(q, q, q.flip(-1), is_causal=True)


def of_shape(*shape: int, module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, shape), module)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(D),
    "batch norm in eval mode": lambda: nn.BatchNorm1d(D).eval(),
    "batch norm without statistics": lambda: nn.BatchNorm1d(D, track_running_stats=False),
    "batch norm of sequences": lambda: of_shape(2, 4, module=nn.BatchNorm1d(2)),
    "batch norm of images": lambda: of_shape(2, 2, 2, module=nn.BatchNorm2d(2)),
    "batch norm of volumes": lambda: of_shape(2, 2, 2, 1, module=nn.BatchNorm3d(2)),
    "batch norm that averages": lambda: nn.BatchNorm1d(D, momentum=None),
    "batch norm that averages images": lambda: of_shape(
        2, 2, 2, module=nn.Sequential(*[nn.BatchNorm2d(2, momentum=None)] * 2)
    ),
    "synchronised batch norm": lambda: nn.SyncBatchNorm(D),
    "a projector used twice": Twice,
    "an RNN": lambda: Recurrence(nn.RNN(4, 3, nonlinearity="relu")),
    "a GRU": lambda: Recurrence(nn.GRU(4, 3, num_layers=2, bidirectional=True)),
    "an LSTM": lambda: Recurrence(nn.LSTM(4, 3, num_layers=2, batch_first=True)),
    "an LSTM with projections": lambda: Recurrence(nn.LSTM(4, 3, proj_size=2, bias=False)),
    "an LSTM that begins elsewhere": lambda: Recurrence(nn.LSTM(4, 3), begin=True),
    "instance norm": lambda: of_shape(
        2, 4, module=nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    ),
    "instance norm of images": lambda: of_shape(2, 2, 2, module=nn.InstanceNorm2d(2)),
    "layer norm": lambda: nn.LayerNorm(D),
    "group norm": lambda: nn.GroupNorm(2, D),
    "RMS norm": lambda: nn.RMSNorm(D),
    "convolution": lambda: of_shape(2, 4, module=nn.Conv1d(2, 3, 3, padding="same")),
    "circular convolution": lambda: of_shape(
        2, 4, module=nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular")
    ),
    "pooling of volumes": lambda: of_shape(1, 2, 2, 2, module=nn.AvgPool3d(2)),
    "the largest of volumes": lambda: of_shape(1, 2, 2, 2, module=nn.MaxPool3d(2)),
    "adaptive pooling of volumes": lambda: of_shape(1, 2, 2, 2, module=nn.AdaptiveMaxPool3d(1)),
    "softmax over channels": lambda: of_shape(2, 2, 2, module=nn.Softmax2d()),
    "circular padding": lambda: of_shape(2, 4, module=nn.CircularPad1d(1)),
    "shuffled channels": lambda: of_shape(4, 2, module=nn.ChannelShuffle(2)),
    "attention": lambda: Attention(batched=False),
    "attention with its batch first": lambda: Attention(batch_first=True),
    "attention without a batch": lambda: Attention(batched=False, batch_first=True),
    "attention with more keys": lambda: Attention(add_bias_kv=True, add_zero_attn=True),
    "attention of other widths": lambda: Attention(kdim=D, vdim=D, batch_first=True),
    "attention under a mask": lambda: Attention(
        batch_first=True, mask=torch.tensor([[False] * (N - 1) + [True]])
    ),
    "attention in eval mode": lambda: Attention(dropout=0.5, batch_first=True).eval(),
    "attention as a function": Fused,
    "a transformer layer": lambda: nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0),
    "a transformer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(D, 2, 16, dropout=0.5, norm_first=True),
        2,
        norm=nn.LayerNorm(D),
        enable_nested_tensor=False,
    ).eval(),
}


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


def on_the_box(traced: Traced) -> GraphFunction:
    return build(traced.graph, traced.tensors, device="cpu", buffers=[*traced.buffers])


@pytest.mark.parametrize("name", MODULES)
def test_a_module_in_a_loss_is_exact(name: str) -> None:
    torch.manual_seed(0)
    loss, z = Loss(MODULES[name]()).double(), drawn()
    before = {key: value.clone() for key, value in loss.state_dict().items()}
    traced = trace(loss, positional=1)
    function = on_the_box(traced)
    parameters = dict(loss.named_parameters())
    assert traced.parameters.keys() == parameters.keys()
    value = function(z)
    function(z)  # a second call begins where the first began
    gradients = torch.autograd.grad(value, [z, *parameters.values()])
    state = loss.state_dict()
    assert all(torch.equal(state[key], was) for key, was in before.items())

    expected = loss(z)
    naive = torch.autograd.grad(expected, [z, *parameters.values()])
    torch.testing.assert_close(value, expected, rtol=TOLERANCE, atol=TOLERANCE)
    for found, right in zip(gradients, naive, strict=True):
        torch.testing.assert_close(found, right, rtol=TOLERANCE, atol=TOLERANCE)
    for buffer, right in loss.named_buffers():
        left = function.buffers[buffer] if buffer in function.buffers else before[buffer]
        torch.testing.assert_close(left, right, rtol=TOLERANCE, atol=TOLERANCE)


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
        (nn.BatchNorm2d(D), "BatchNorm2d: expected 4D input"),
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


def test_a_recurrent_layer_that_drops_is_random() -> None:
    layer = nn.LSTM(4, 3, num_layers=2, dropout=0.1)
    with pytest.raises(UntraceableLoss, match="loss_inputs"):
        trace(Recurrence(layer), positional=1)
    trace(Recurrence(layer.eval()), positional=1)


@pytest.mark.parametrize(
    "module",
    [
        Recurrence(nn.LSTM(4, 3)).double().requires_grad_(False),
        lambda z: F.scaled_dot_product_attention(z[None], z[None], z[None]),
    ],
    ids=["LSTM", "attention"],
)
def test_what_is_computed_unfused_has_a_second_derivative(module: Callable[..., Tensor]) -> None:
    def loss(z: Tensor) -> Tensor:
        return module(z).square().sum()

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


@pytest.mark.parametrize(
    "weights", [(11, 11), (12, 12, 12), ()], ids=["gates missing", "too few", "none"]
)
def test_a_recurrent_layer_with_odd_weights_reaches_no_kernel(weights: tuple[int, ...]) -> None:
    def loss(z: Tensor) -> Tensor:
        stacked = [z.new_ones((rows, 4)) for rows in weights]
        zeros = z.new_zeros((1, 2, 3))
        steps = z.reshape(6, 2, 4)
        return torch.lstm(steps, (zeros, zeros), stacked, False, 1, 0.0, False, False, False)[
            0
        ].sum()

    function = on_the_box(trace(loss, positional=1))
    with pytest.raises((RuntimeError, GraphRefused)):
        function(drawn())


@pytest.mark.parametrize("num_layers", [0, 1])
def test_packed_sequences_reach_no_kernel(num_layers: int) -> None:
    weights = [weight.detach().double() for weight in nn.LSTM(4, 3).parameters()]
    lengths = torch.tensor([6, 60])

    def loss(z: Tensor) -> Tensor:
        zeros, packed = z.new_zeros((1, 6, 3)), z.reshape(12, 4)
        arguments = (packed, lengths, (zeros, zeros), weights, True, num_layers, 0.0, False, False)
        return torch.lstm(*arguments)[0].sum()

    with pytest.raises((UntraceableLoss, GraphRefused)):
        on_the_box(trace(loss, positional=1))(drawn())


def test_a_mask_of_the_wrong_shape_reaches_no_kernel() -> None:
    def loss(z: Tensor) -> Tensor:
        q = z[None, None]
        return F.scaled_dot_product_attention(q, q, q, torch.zeros(2, 2, dtype=z.dtype)).sum()

    function = on_the_box(trace(loss, positional=1))
    with pytest.raises((RuntimeError, GraphRefused)):
        function(drawn())
