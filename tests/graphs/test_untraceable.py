"""What cannot be traced is refused with the line of the user's code and what to do instead."""

from __future__ import annotations

import functools
import inspect
import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from random import uniform
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradbox.errors import GraphRefused, InvalidInputs, UntraceableLoss
from gradbox.tracing.interception import OF_TORCH, generators, stand_ins
from gradbox.tracing.trace import trace

OUTER = nn.Parameter(torch.ones(3))
OUTER_COMPUTED = OUTER.exp()
OUTER_MODULE = nn.Linear(3, 3)


def branch(z: Tensor) -> Tensor:
    if z.sum() > 0:  # here
        return z.sum()
    return z.mean()


def branch_on_a_size(z: Tensor) -> Tensor:
    return z.sum() if z.dim() == 1 else z.mean()  # here


def rest_of_a_size(z: Tensor) -> Tensor:
    num, *rest = z.shape  # here
    return z.reshape(num, -1).sum() / len(rest)


def loop(z: Tensor) -> Tensor:
    total = 0.0
    for row in z:  # here
        total = total + row.sum()
    return total


def item(z: Tensor) -> Tensor:
    scale = z.max().item()  # here
    return z.sum() / scale


def to_float(z: Tensor) -> Tensor:
    return z.sum() * float(z.max())  # here


def to_numpy(z: Tensor) -> Tensor:
    return z.sum() + z.detach().numpy().sum()  # here


def numpy_array(z: Tensor) -> Tensor:
    return (np.ones(3) * z).sum()  # here


def scipy(z: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(z)  # here
    return z[rows, columns].sum()


def differentiated(z: Tensor) -> Tensor:
    return torch.autograd.grad(z.sum(), z)[0].sum()  # here


def backward(z: Tensor) -> Tensor:
    z.sum().backward()  # here
    return z.sum()


def data(z: Tensor) -> Tensor:
    z.data = z.exp()  # here
    return z.sum()


def autocast(z: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (z @ z.T).sum()  # here


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def custom_function(z: Tensor) -> Tensor:
    return StraightThrough.apply(z).sum()  # here


def unrolled(z: Tensor) -> Tensor:
    for _ in range(10_000):
        z = z + 1  # here
    return z.sum()


def in_a_helper(z: Tensor) -> Tensor:
    return item(z)


def type_match(z: Tensor) -> Tensor:
    match z:
        case torch.Tensor():  # here
            return z.sum()
        case _:
            return z


def printed(z: Tensor) -> Tensor:
    print(z)  # here
    return z.sum()


def doubled(z: Tensor) -> Tensor:
    return z * 2


@functools.cache
def compiled() -> Callable[[Tensor], Tensor]:
    return torch.compile(doubled)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit is deprecated, and still used
    SCRIPTED = torch.jit.script(doubled)  # type: ignore[no-untyped-call]


def random_generator_of_torch(z: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (z @ torch.randn(4, 8, generator=generator)).sum()  # here


@torch.enable_grad()
def random_in_a_decorated_function(z: Tensor) -> Tensor:
    return z.sum() * uniform(0, 1)  # here


FUNCTIONS = [
    (branch, "torch.where"),
    (branch_on_a_size, "Python value"),
    (
        lambda z: z.float().sum() if z.dtype == torch.float16 and 2 * z.dim() > 2 else z.sum(),
        "ranks, sizes and dtypes are not known",
    ),
    (lambda z: torch.zeros(*z.shape).sum() + z.sum(), "z.shape itself"),
    (lambda z: z.sum() / np.prod(z.shape[1:]), "z.shape.numel()"),
    (rest_of_a_size, "as many names"),
    (loop, "batched"),
    (lambda z: sum(z[i].sum() for i in range(z.shape[0])), "torch.arange"),
    (lambda z: sum(z[i].sum() for i in range(len(z))), "torch.arange"),
    (item, "keep it a tensor"),
    (lambda z: torch.vmap(lambda row: row.norm())(z).sum(), "batched operations"),
    (lambda z: torch.func.grad(lambda y: y.square().sum())(z).sum(), "batched operations"),
    (to_float, "math.sqrt"),
    (to_numpy, "keep it a tensor"),
    (numpy_array, "torch.from_numpy"),
    (scipy, "the torch function"),
    (lambda z: (z + torch.randn(z.shape[0], 3)).sum(), "loss_inputs"),
    (lambda z: (z + torch.randn_like(z)).sum(), "loss_inputs"),
    (lambda z: z.sum() * random.random(), "loss_inputs"),
    (lambda z: z.sum() * uniform(0, 1), "loss_inputs"),
    (lambda z: z.sum() * np.random.rand(), "loss_inputs"),
    (lambda z: z.clone().uniform_().sum(), "loss_inputs"),
    (lambda z: F.dropout(z, 0.1).sum(), "loss_inputs"),
    (differentiated, "formula"),
    (differentiated, "client.model(...)"),
    (backward, "formula"),
    (data, "copy_"),
    (lambda z: torch.empty(z.shape[0], 3).sum() + z.sum(), "zeros_like"),
    (lambda z: torch.svd(z)[1].sum(), "torch.linalg"),
    (lambda z: z.cholesky().sum(), "torch.linalg"),
    (lambda z: nn.utils.rnn.pad_sequence([z[:2], z[2:]]).sum(), "functional.pad"),
    (lambda z: z.sum() / float(z.shape[0]), "divide by a size as it is"),
    (lambda z: (torch.exp(OUTER) * z).sum(), "nn.Module"),
    (lambda z: (z * OUTER_COMPUTED).sum(), "loss_inputs"),
    (lambda z: OUTER_MODULE(z).sum(), "submodule"),
    (autocast, ".float()"),
    (custom_function, ".detach()"),
    (custom_function, "client.model(...)"),
    (unrolled, "batched"),
    (lambda z: z.sum() if isinstance(z.sum(), torch.Tensor) else z, "outside the function"),
    (lambda z: z.sum() if torch.is_tensor(z.sum()) else z, "outside the function"),
    (type_match, "outside the function"),
    (lambda z: z.sum() if z.dtype in {torch.float16} else z.mean(), "outside the function"),
    (lambda z: z.sum() if "float16" in str(z.dtype) else z.mean(), "outside the function"),
    (lambda z: z.sum() if f"{z.dtype}" == "torch.float16" else z.mean(), "outside the function"),
    (lambda z: z.sum() if f"{z.mean():.3f}" else z.mean(), "outside the function"),
    (printed, "leave print() out"),
    (lambda z: compiled()(z).sum(), "torch.compile made"),
    (lambda z: SCRIPTED(z).sum(), "torch.jit made"),
    (lambda z: z.sum() * random.Random(0).random(), "loss_inputs"),
    (lambda z: z.sum() * np.random.default_rng(0).normal(), "loss_inputs"),
    (random_generator_of_torch, "loss_inputs"),
    (random_in_a_decorated_function, "loss_inputs"),
    (lambda z: undefined_name + z.sum(), "undefined_name"),  # type: ignore[name-defined]  # noqa: F821
]


def marked_line(function: Callable[..., Any]) -> int:
    """Return the line that ends so, or where a function of one line is."""
    lines, first = inspect.getsourcelines(function)
    marked = (i for i, line in enumerate(lines) if line.rstrip().endswith("# here"))
    return first + next(marked, 0)


@pytest.mark.parametrize(
    ("function", "advice"), FUNCTIONS, ids=lambda value: getattr(value, "__name__", value)
)
def test_the_error_names_the_line_and_what_to_do(function: Callable[..., Any], advice: str) -> None:
    with pytest.raises(UntraceableLoss) as caught:
        trace(function, positional=1)
    message = str(caught.value)
    assert f"{Path(__file__).name}:{marked_line(function)}: `" in message
    assert advice in message


@pytest.mark.parametrize(
    "function", [branch, branch_on_a_size, loop, item, to_float, to_numpy, numpy_array, scipy]
)
def test_what_needs_values_names_the_way_that_has_them(function: Callable[..., Any]) -> None:
    with pytest.raises(UntraceableLoss, match=r"client\.model\(.*docs/remote_autograd\.md"):
        trace(function, positional=1)


def test_the_line_is_in_the_helper_that_does_it() -> None:
    with pytest.raises(UntraceableLoss, match=f":{marked_line(item)}: "):
        trace(in_a_helper, positional=1)


def test_the_line_is_the_users_own_where_a_library_does_it(tmp_path: Path) -> None:
    path = tmp_path / "site-packages" / "pooling" / "heads.py"
    path.parent.mkdir(parents=True)
    path.write_text("def helper(z):\n    return z if z.dim() == 2 else z[0]\n")
    module: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), module)

    def loss(z: Tensor) -> Tensor:
        pooled: Tensor = module["helper"](z)
        return pooled.sum()

    with pytest.raises(UntraceableLoss, match=r"`pooled: .*helper.*`: in pooling/heads\.py:2: "):
        trace(loss, positional=1)
    with pytest.raises(UntraceableLoss, match=r"`trace\(.*`: in pooling/heads\.py:2: "):
        trace(module["helper"], positional=1)


def test_another_thread_may_draw_random_numbers_meanwhile() -> None:
    def loss(z: Tensor) -> Tensor:
        other = threading.Thread(target=lambda: drawn.append(random.random()))
        other.start()
        other.join()
        return z.sum()

    drawn: list[float] = []
    trace(loss, positional=1)
    assert len(drawn) == 1


def test_a_parameter_read_as_a_number_would_lose_its_gradient() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, z: Tensor) -> Tensor:
            return z.sum() * self.scale.item()

    with pytest.raises(UntraceableLoss, match="gradient"):
        trace(Scaled(), positional=1)


def test_a_loss_that_torch_compiled_is_refused_as_such() -> None:
    for made, by in (
        (compiled(), "compile"),
        (torch.compile(nn.Tanh()), "compile"),
        (SCRIPTED, "jit"),
    ):
        with pytest.raises(UntraceableLoss, match=rf"what torch\.{by} made cannot be traced; use"):
            trace(made, positional=1)


@pytest.mark.parametrize(
    ("result", "got"), [(None, "nothing"), (1.0, "float"), ((1, 2), "tuple"), ({}, "dict")]
)
def test_a_function_returns_a_tensor(result: Any, got: str) -> None:
    with pytest.raises(UntraceableLoss, match=f"<lambda> must return .*it returns {got}"):
        trace(lambda z: result, positional=1)


@pytest.mark.parametrize(
    "arguments",
    [{"positional": 1}, {"positional": 1, "arguments": ["label"]}, {"positional": 3}],
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, Any]) -> None:
    def loss(z: Tensor, labels: Tensor) -> Tensor:
        return (z * labels).sum()

    with pytest.raises(InvalidInputs, match=r"loss takes \(z.*, labels.*\)"):
        trace(loss, **arguments)


class CallableLoss:
    def __call__(self, z: Tensor) -> Tensor:
        return z.sum() if isinstance(z.sum(), torch.Tensor) else z

    def method(self, z: Tensor) -> Tensor:
        return self(z) * uniform(0, 1)


def test_a_readout_does_not_leave_the_models_autocast() -> None:
    def readout(output: Any, inputs: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            pooled: Tensor = output.float().mean(1)
        return pooled

    with pytest.raises(UntraceableLoss, match=r"a readout switches autocast.*precision="):
        trace(readout, positional=2, structured=True)


def in_another_module(source: str) -> Callable[..., Any]:
    """Return `helper` of a module that is not the loss's own."""
    module: dict[str, Any] = {"torch": torch, "__file__": "library.py"}
    exec(compile(source, "library.py", "exec"), module)
    helper: Callable[..., Any] = module["helper"]
    return helper


def test_a_type_test_is_refused_wherever_it_stands() -> None:
    helper = in_another_module(
        "def helper(z): return z if isinstance(z + 0, torch.Tensor) else 0 * z"
    )
    for function in (CallableLoss(), CallableLoss().method, lambda z: helper(z).sum()):
        with pytest.raises(UntraceableLoss, match="isinstance"):
            trace(function, positional=1)


def test_random_numbers_of_others_are_drawn_while_a_function_is_traced() -> None:
    drawn: list[float] = []

    def loss(z: Tensor) -> Tensor:
        other = threading.Thread(target=lambda: drawn.append(random.Random(3).random()))
        other.start()
        other.join()
        return z.sum()

    trace(loss, positional=1)
    assert drawn == [random.Random(3).random()]
    assert not {"random", "getrandbits"} & set(vars(random.Random))


def test_what_is_not_callable_is_refused() -> None:
    with pytest.raises(InvalidInputs, match="got str"):
        trace("info_nce", positional=1)  # type: ignore[arg-type]


def test_a_graph_that_the_box_would_refuse_is_refused_at_home() -> None:
    with pytest.raises(GraphRefused, match="2000 entries"):
        trace(lambda z: z[[0] * 2000].sum(), positional=1)


def test_tracing_leaves_torch_and_math_as_they_were() -> None:
    import math

    def replaced() -> list[Any]:
        custom = vars(torch.autograd.Function)["apply"]
        return [torch.zeros, torch.is_tensor, torch.finfo, math.sqrt, isinstance, custom]

    before = replaced()
    with pytest.raises(UntraceableLoss):
        trace(branch, positional=1)
    assert before == replaced()
    assert torch.is_grad_enabled()
    assert "isinstance" not in globals()


def test_every_name_of_torch_that_is_replaced_is_listed() -> None:
    replaced = stand_ins(generators())
    found = {name for name, value in vars(torch).items() if id(value) in replaced}
    assert found == set(OF_TORCH)


def test_a_scripted_module_inside_a_loss_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        head = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Flatten(0))  # type: ignore[no-untyped-call]
    with pytest.raises(UntraceableLoss, match=r"torch\.jit made"):
        trace(head, positional=1)
