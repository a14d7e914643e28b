"""Calls of torch's own database of operators, each as itself and as a graph that was sent.

`main(3, ["float64"])` takes three calls of each operator, as a function, as a method and in place,
and prints as JSON how many agree, are refused or differ, and which differ. It wants a process of
its own: the database's modules switch global flags of torch off.
"""

from __future__ import annotations

import json
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradbox.errors import GradboxError
from gradbox.graphs.schema import Graph
from gradbox.tracing.trace import trace
from gradbox_worker.interpreting.build import build

# The database would look through all modules for the test of torch's own that asks it.
common_utils.extract_test_fn = core.extract_test_fn = lambda: None

# The fixture's own: it forbids the flags by which CTC is kept from cuDNN.
LEFT_OUT = {"nn.functional.ctc_loss"}
ERRORS = (AttributeError, AssertionError, IndexError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Call:
    """A call of an operator, whose tensors are arguments."""

    name: str
    function: Callable[..., Any]
    leaves: list[Any]
    spec: Any

    @property
    def places(self) -> list[int]:
        return [place for place, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]

    def __call__(self, *tensors: Any) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        first, args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(first, *args, **kwargs)


def calls(num: int, dtype: torch.dtype) -> Iterator[Call]:
    """Yield at most so many calls of each form of each operator."""
    for op in op_db:
        if dtype not in op.dtypes or op.name in LEFT_OUT:
            continue
        forms = [op.op]
        for form in (op.method_variant, op.inplace_variant):
            if hasattr(form, "__name__"):
                forms.append(method(form.__name__))
        made = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd)
        samples = list(islice(made, 4 * num))
        random.Random(0).shuffle(samples)
        for form in forms:
            for sample in samples[:num]:
                yield Call(op.name, form, *tree_flatten((sample.input, sample.args, sample.kwargs)))


def method(name: str) -> Callable[..., Any]:
    return lambda owner, *args, **kwargs: getattr(owner, name)(*args, **kwargs)


def value_of(call: Callable[..., Any], expected: Any) -> Callable[..., Any]:
    """Return a loss of the call's results, whose kinds those of an earlier call have."""
    several = isinstance(expected, tuple | list)
    kinds = [part.dtype if isinstance(part, Tensor) else None for part in tree_flatten(expected)[0]]

    def loss(*tensors: Any) -> Any:
        result = call(*tensors)
        total: Any = 0
        for place, kind in enumerate(kinds):
            part = result[place] if several else result
            if kind is not None and kind.is_complex:
                total = total + part.real.sin().sum() + (part.imag * 2).sin().sum()
            elif kind is not None:
                total = total + part.to(torch.float64).sin().sum()
        return total

    return loss


def with_gradients(loss: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    value = loss(*[leaf * 1 if leaf.requires_grad else leaf for leaf in leaves])
    if not isinstance(value, Tensor):
        raise TypeError("the call gives no tensor")
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not wanted or not value.requires_grad:
        return [value]
    found = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
    return [value.detach(), *found]


def outcome(call: Call) -> str:
    """Tell what became of a call: agrees, refused, differs, or it has nothing to compare."""
    tensors = [call.leaves[place] for place in call.places]
    if not tensors or len(set(map(id, tensors))) < len(tensors):
        return "no tensors"
    if any(tensor.layout != torch.strided for tensor in tensors):
        return "not dense"
    try:
        fresh = [tensor.detach().clone() for tensor in tensors]
        loss = value_of(call, call(*fresh))
        expected, again = (with_gradients(loss, tensors) for _ in range(2))
    except ERRORS:
        return "no value"  # a gradient that torch lacks, a tensor that may not be written to
    if not same(expected, again):
        return "random"
    try:
        traced = trace(loss, positional=len(tensors))
        graph = Graph.model_validate_json(traced.graph.model_dump_json())
        found = with_gradients(build(graph, traced.tensors, device="cpu"), tensors)
    except (GradboxError, AssertionError):  # here, or by a check on the box
        return "refused"
    except ERRORS as error:
        return f"differs: {error!r}"
    return "agrees" if same(expected, found) else "differs"


def same(expected: list[Tensor], found: list[Tensor]) -> bool:
    return len(expected) == len(found) and all(
        torch.allclose(left, right, rtol=1e-11, atol=1e-11, equal_nan=True)
        for left, right in zip(expected, found, strict=True)
    )


def main(num: int, dtypes: list[str]) -> None:
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    wrong = []
    for dtype in dtypes:
        for call in calls(num, getattr(torch, dtype)):
            found = outcome(call)
            counts[found.partition(":")[0]] += 1
            if found.startswith("differs"):
                wrong.append(f"{call.name}: {found}")
    print(json.dumps({"counts": counts, "wrong": wrong}))
