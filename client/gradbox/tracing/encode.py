"""From a torch.fx graph to the JSON form of `gradbox.graphs.schema`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node as FxNode

from gradbox.errors import UntraceableLoss
from gradbox.graphs import allow_list, targets
from gradbox.graphs.check import names_device
from gradbox.graphs.schema import Graph, Node


def encode(graph: FxGraph) -> Graph:
    """Write a recorded graph down.

    Raises:
        UntraceableLoss: an argument has no JSON form.
    """
    return Graph(nodes=[_node(node) for node in graph.nodes])


def _node(node: FxNode) -> Node:
    target, args, kwargs = node.target, node.args, dict(node.kwargs)
    if node.op == "call_function":
        target = targets.name_of(target) or ""
        if target == allow_list.ATTRIBUTE and args[1] not in allow_list.ATTRIBUTES:
            target = allow_list.FIELD
        if kwargs.get("layout") is torch.strided:
            del kwargs["layout"]
    if node.op == "call_method" and target == "to":
        args = (args[0], *(_as_device(value) for value in args[1:]))
    if kwargs.get("device") is not None:
        kwargs["device"] = _as_device(kwargs["device"])
    return Node(
        op=node.op,  # type: ignore[arg-type]
        name=node.name,
        target=str(target),
        args=[] if node.op == "placeholder" else [_form(value, node) for value in args],
        kwargs={name: _form(value, node) for name, value in kwargs.items()},
    )


def _as_device(value: Any) -> Any:
    """Read "cuda:1", or 1, as the device it names; leave dtypes, nodes and flags alone."""
    return torch.device("cpu") if names_device(value) else value


def _form(value: Any, node: FxNode) -> Any:
    match value:
        case FxNode():
            return {"node": value.name}
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        case complex():
            return {"complex": [value.real, value.imag]}
        case tuple():
            return {"tuple": [_form(item, node) for item in value]}
        case list():
            return [_form(item, node) for item in value]
        case slice():
            return {"slice": [_form(part, node) for part in (value.start, value.stop, value.step)]}
        case dict():
            return {"dict": [[key, _form(item, node)] for key, item in value.items()]}
        case _:
            return _constant(value, node)


def _constant(value: Any, node: FxNode) -> Any:
    if value is ...:
        return {"ellipsis": True}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "job"}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    raise UntraceableLoss(
        f"an argument of {node.name} is a {type(value).__name__}, which a graph cannot hold; "
        "use numbers, strings, dtypes and tensors"
    )
