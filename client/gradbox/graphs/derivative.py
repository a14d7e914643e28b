"""Whether a graph's output has a derivative, as far as the graph alone shows it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from gradbox.graphs import allow_list
from gradbox.graphs.schema import Graph, Node


def may_have_derivative(
    graph: Graph, *, constants: Collection[str], trainable: Collection[str]
) -> bool:
    """Tell whether a path without `detach`, argmax and their like leads to the output.

    Args:
        constants: the arguments from which no such path begins.
        trainable: the tensors from which one does.

    Returns:
        True also where the graph does not tell: it writes in place.
    """
    differentiable: set[str] = set()
    with_grad = True
    for node in graph.nodes:
        if node.target == allow_list.GRAD_MODE:
            with_grad = bool(node.args[0])
            continue
        if node.target in allow_list.IN_PLACE or node.target in allow_list.WRITING_FUNCTIONS:
            return True
        if node.op == "placeholder":
            leads = node.target not in constants
        elif node.op == "get_attr":
            leads = node.target in trainable
        else:
            cut = node.target.rpartition(".")[2] in allow_list.WITHOUT_DERIVATIVE
            passes = node.op == "output" or (with_grad and not cut)
            leads = passes and not differentiable.isdisjoint(_read(node))
        if leads:
            differentiable.add(node.name)
    return graph.nodes[-1].name in differentiable


def _read(node: Node) -> Iterator[str]:
    """Give the names of the nodes that a node reads."""
    left: list[Any] = [*node.args, *node.kwargs.values()]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            if "node" in value:
                yield value["node"]
            else:
                left += value.values()
