"""The lean forward-mode rules give what torch's give, by fewer kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gradbox_engine.mixed.forward_rules import LeanRules, Roundings


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


W, B4, IMAGE = numbers(4, 3), numbers(4), numbers(2, 3, 5, 5)
KERNEL, BACK = numbers(4, 3, 3, 3), numbers(3, 4, 3, 3)
MEAN, VARIANCE, SCALE = numbers(3), numbers(3).square() + 0.1, numbers(3)

OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "linear": (lambda x: F.linear(x, W, B4), numbers(2, 3)),
    "linear without bias": (lambda x: F.linear(x, W), numbers(2, 6, 3)),
    "linear by name": (lambda x: F.linear(input=x, weight=W, bias=B4), numbers(2, 3)),
    "conv2d": (lambda x: F.conv2d(x, KERNEL, B4, stride=2, padding=1), IMAGE),
    "conv2d, same": (lambda x: F.conv2d(x, KERNEL, B4, padding="same"), IMAGE),
    "conv1d": (lambda x: F.conv1d(x, numbers(4, 3, 2), B4, groups=1), numbers(2, 3, 7)),
    "conv_transpose2d": (lambda x: F.conv_transpose2d(x, BACK, B4, 2, 1, 1), IMAGE),
    "matmul": (lambda x: x @ W.T, numbers(2, 3)),
    "matmul from the left": (lambda x: torch.matmul(W, x), numbers(3, 2)),
    "product with itself": (lambda x: x @ x.mT, numbers(2, 3)),
    "bmm": (lambda x: torch.bmm(x, numbers(2, 3, 4)), numbers(2, 5, 3)),
    "addmm": (lambda x: torch.addmm(B4, x, W.T), numbers(2, 3)),
    "addmm, scaled": (lambda x: torch.addmm(B4, x, W.T, alpha=2.0, beta=0.5), numbers(2, 3)),
    "batch norm": (lambda x: F.batch_norm(x, MEAN, VARIANCE, SCALE, MEAN, False, 0.1, 1e-3), IMAGE),
    "batch norm in train": (lambda x: F.batch_norm(x, None, None, SCALE, MEAN, True), IMAGE),
    "batch norm without scale": (lambda x: F.batch_norm(x, MEAN, VARIANCE), IMAGE),
    "a scalar times": (lambda x: 0.1 * x, numbers(2, 3)),
    "times a scalar": (lambda x: x * 3, numbers(2, 3)),
    "times a larger tensor": (lambda x: torch.mul(x, numbers(4, 2, 3)), numbers(2, 3)),
    "a tensor times": (lambda x: B4 * x, numbers(2, 1)),
    "times itself": (lambda x: x * x, numbers(2, 3)),
    "divided by": (lambda x: x / SCALE, numbers(2, 3)),
    "divided and floored": (lambda x: x.div(0.1, rounding_mode="floor"), numbers(2, 3)),
    "a divisor": (lambda x: SCALE / x, numbers(2, 3)),
    "in-place after a rule": (lambda x: F.relu_(F.linear(x, W, B4)), numbers(2, 3)),
    "a weight that moves": (lambda x: F.linear(numbers(2, 3), x, B4), W),
    "a bias that moves": (lambda x: F.linear(numbers(2, 3), W, x), B4),
    "all of linear moves": (lambda x: F.linear(x, x, x[0]), numbers(3, 3)),
    "a shift that moves": (lambda x: torch.addmm(x, numbers(2, 3), W.T), B4),
    "all of addmm moves": (lambda x: torch.addmm(x, x, x), numbers(3, 3)),
    "a scale of batch norm that moves": (lambda x: F.batch_norm(IMAGE, MEAN, VARIANCE, x), SCALE),
    "all of batch norm moves": (
        lambda x: F.batch_norm(x, MEAN, VARIANCE, x.mean((0, 2, 3)), x.sum((0, 2, 3))),
        IMAGE,
    ),
    "group norm": (lambda x: F.group_norm(x, 3, SCALE, MEAN), IMAGE),
    "group norm of a constant": (lambda x: F.group_norm(IMAGE, 3, x), SCALE),
    "matmul by name": (lambda x: torch.matmul(input=x, other=W.T), numbers(2, 3)),
    "times by name": (lambda x: torch.mul(x, other=SCALE), numbers(2, 3)),
    "divided by name": (lambda x: torch.div(x, other=SCALE), numbers(2, 3)),
    "addmm by name": (lambda x: torch.addmm(B4, mat1=x, mat2=W.T), numbers(2, 3)),
    "batch norm by name": (
        lambda x: F.batch_norm(x, running_mean=MEAN, running_var=VARIANCE, eps=0.1),
        IMAGE,
    ),
}


def both(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone(), numbers(*x.shape).sin().to(x))
        value, tangent = forward_ad.unpack_dual(function(dual))
    return value.clone(), tangent


@pytest.mark.parametrize("name", OPERATIONS)
def test_value_and_tangent_are_those_of_torch(name):
    function, x = OPERATIONS[name]
    expected = both(function, x)
    with LeanRules():
        found = both(function, x)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


class Kernels(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("linear without bias", "mm"),
        ("conv2d", "convolution"),
        ("conv_transpose2d", "convolution"),
        ("matmul", "mm"),
        ("batch norm", "native_batch_norm"),
        ("a scalar times", "mul"),
        ("divided by", "div"),
    ],
)
def test_value_and_tangent_take_one_kernel_each(name, kernel):
    function, x = OPERATIONS[name]
    with LeanRules(), Kernels() as kernels:
        both(function, x)
    assert kernels.counts[kernel] == 2


def test_the_coarsest_dtype_that_carries_a_tangent_is_told():
    def with_a_rounded_constant(x: Tensor) -> Tensor:
        return x + SCALE.half()

    with LeanRules() as rules:
        both(with_a_rounded_constant, numbers(3))
        assert rules.rounding == torch.float64
        both(lambda x: x.float().double(), numbers(3))
    assert rules.rounding == torch.float32


def test_the_coarsest_dtype_that_has_a_graph_is_told():
    with Roundings() as seen:
        numbers(3).half()
        numbers(3).requires_grad_().float()
    assert seen.rounding == torch.float32
