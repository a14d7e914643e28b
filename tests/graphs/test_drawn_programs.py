"""Random programs: the graph has the value and the gradients of the function, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbox.errors import GraphRefused
from gradbox.graphs.schema import Graph
from gradbox.tracing.trace import trace
from gradbox_worker.interpreting.build import build
from tests.graphs.drawn_programs import Program, function_of, tensors

NUM_DRAWS = 60
LEAVES = ("z", "y")


def outcome(function: Callable[..., Tensor], arguments: dict[str, Tensor]) -> Any:
    """Return the value and the gradients, or None where torch has none to give."""
    leaves = [arguments[name] for name in LEAVES]
    try:
        given = {**arguments, **{name: arguments[name] * 1 for name in LEAVES}}
        value = function(given.pop("z"), **given)
        found = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    except GraphRefused:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError, AssertionError):
        return None
    return value.detach(), *found


def same(left: Any, right: Any) -> bool:
    return all(
        one.dtype == other.dtype and torch.equal(one.nan_to_num(12.5), other.nan_to_num(12.5))
        for one, other in zip(left, right, strict=True)
    )


def differences(source: str, seed: int, dtype: torch.dtype) -> tuple[int, list[str]]:
    """Return how many comparisons a program stood, and where its graph differs."""
    arguments, constants = tensors(5, seed, dtype)
    names = [name for name in arguments if name != "z"]
    traced = trace(function_of(source, constants), positional=1, arguments=names)
    graph = Graph.model_validate_json(traced.graph.model_dump_json())
    again = build(graph, traced.tensors, device="cpu")
    num, found = 0, []
    for rows in (5, 5, 4, 7):  # the second call starts as the first did
        arguments, constants = tensors(rows, seed, dtype)
        expected = outcome(function_of(source, constants), arguments)
        got = outcome(again, tensors(rows, seed, dtype)[0])
        if expected is None:  # torch refuses more of what is written in place than a graph does
            continue
        num += 1
        if got is None or not same(expected, got):
            found.append(f"{rows} rows of {dtype}:\n{source}")
    return num, found


@pytest.mark.parametrize(
    "seeds",
    [range(NUM_DRAWS), pytest.param(range(NUM_DRAWS, 1500), marks=pytest.mark.slow)],
    ids=["some", "many"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_drawn_program_is_the_same_on_the_box(seeds: range) -> None:
    compared, found = 0, []
    for seed in seeds:
        source = Program(seed).source
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            num, differing = differences(source, seed, dtype)
            compared += num
            found += differing
    assert not found, found[0]
    assert compared > 4 * len(seeds)


def test_a_graph_that_differs_in_one_number_is_seen() -> None:
    arguments, _ = tensors(5, 0, torch.float64)
    left = outcome(lambda z, **given: (z * z).sum(), arguments)
    right = outcome(lambda z, **given: (z * z.detach()).sum(), arguments)
    assert same(left, left)
    assert not same(left, right)
