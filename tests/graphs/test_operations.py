"""Every operation of the allow-list that takes one or two matrices is traced as itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbox.graphs import allow_list, targets
from gradbox.tracing.trace import trace
from gradbox_worker.interpreting.build import build

Z = torch.rand(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
OTHERS: tuple[tuple[Any, ...], ...] = ((), (Z.T.clone(),), (1,), (1, 1), (Z, Z), (0, Z.long()))


def operations() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, function in targets.FUNCTIONS.items():
        if name.startswith(("torch.", "operator.")) and name != allow_list.GRAD_MODE:
            yield name, function
    for name in sorted(allow_list.METHODS):
        yield f".{name}()", method(name)


def method(name: str) -> Callable[..., Any]:
    return lambda z, *rest: getattr(z, name)(*rest)


def tried(function: Callable[..., Any]) -> tuple[tuple[Any, ...], Tensor] | None:
    """Return the first arguments after Z with which a function gives a tensor, and that tensor."""
    for rest in OTHERS:
        try:
            result = function(Z.clone(), *rest)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            continue
        if isinstance(result, tuple | list) and result:
            result = result[0]
        if isinstance(result, Tensor):
            return rest, result
    return None


def traced_again(function: Callable[..., Any], rest: tuple[Any, ...], *, first: bool) -> Tensor:
    def user(z: Tensor) -> Tensor:
        result = function(z, *rest)
        found: Tensor = result[0] if first else result
        return found

    traced = trace(user, positional=1)
    again: Tensor = build(traced.graph, traced.tensors, device="cpu")(Z.clone())
    return again


@pytest.mark.filterwarnings("ignore")
def test_an_operation_is_traced_as_itself() -> None:
    agreed = []
    for name, function in operations():
        found = tried(function)
        if found is None:
            continue
        rest, expected = found
        first = isinstance(function(Z.clone(), *rest), tuple | list)
        got = traced_again(function, rest, first=first)
        # LAPACK's last bit depends on where in memory its arguments lie.
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13, equal_nan=True, msg=name)
        agreed.append(name)
    assert len(agreed) > 500
