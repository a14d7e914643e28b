"""What runs for a graph: a step for each node, whatever tensors the graph is built with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from gradbox.errors import GraphRefused
from gradbox.graphs import allow_list, targets
from gradbox.graphs.check import arguments_of, function_writes
from gradbox.graphs.schema import Graph, Node
from gradbox_engine.torch_private import switch_gradients
from gradbox_worker.interpreting.bounded_arithmetic import with_bounds

Values = dict[str, Any]
_Reader = Callable[[Values], Any]

# Where the values of a run keep the caller's grad mode, its copies, and the tensors that the graph
# was built with; no node has such a name.
OUTER: Final = ""
COPIES: Final = "="
TENSORS: Final = "#"


class Program:
    """What runs for a graph, whatever tensors it reads.

    Attributes:
        arguments: the names of its arguments in order.
        names: the names of their nodes.
        reads: the names of the tensors that it is built with.
    """

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self.device = device
        self.arguments = arguments_of(graph)
        self.names = tuple(node.name for node in graph.nodes if node.op == "placeholder")
        self.reads = tuple({node.target: None for node in graph.nodes if node.op == "get_attr"})
        self.output = _reader(graph.nodes[-1].args[0], device)
        self._writes = any(_writes(node) for node in graph.nodes)
        self.steps = [
            _Step(
                name=node.name,
                operation=f"{node.target} (node {node.name!r})",
                run=self._operation(node, device),
                last_used=tuple(names),
            )
            for node, names in zip(graph.nodes, _last_uses(graph), strict=True)
            if node.op not in ("placeholder", "output")
        ]

    def own(self, value: Any, values: Values) -> Any:
        """Return a value that the graph may write into."""
        return values[COPIES].of(value) if self._writes else value

    def _operation(self, node: Node, device: torch.device) -> _Reader:
        if node.op == "get_attr":
            target = node.target
            return lambda values: self.own(values[TENSORS][target], values)
        if node.target == allow_list.GRAD_MODE:
            enabled = node.args[0]
            return lambda values: switch_gradients(enabled and values[OUTER])
        return _call(node, device)


@dataclass(frozen=True)
class _Step:
    name: str
    operation: str  # for messages
    run: _Reader
    last_used: tuple[str, ...]  # values that no later step reads: deleted after it


def _call(node: Node, device: torch.device) -> _Reader:
    args = [_reader(value, device) for value in node.args]
    kwargs = {name: _reader(value, device) for name, value in node.kwargs.items()}
    function = _method(node.target) if node.op == "call_method" else _function(node.target)
    if node.target in allow_list.FACTORIES and not node.target.endswith("_like"):
        kwargs["device"] = _reader({"device": "job"}, device)

    def call(values: Values) -> Any:
        return function(
            *(read(values) for read in args),
            **{name: read(values) for name, read in kwargs.items()},
        )

    return call


def _function(name: str) -> Callable[..., Any]:
    if name == allow_list.ATTRIBUTE:
        return _attribute
    return with_bounds(name, _installed(name, targets.FUNCTIONS.get(name)))


def _installed(name: str, function: Callable[..., Any] | None) -> Callable[..., Any]:
    if function is None:
        raise GraphRefused(f"{name} is allowed, but torch {torch.__version__} of this box lacks it")
    return function


def _method(name: str) -> Callable[..., Any]:
    method = with_bounds(name, _installed(name, getattr(torch.Tensor, name, None)))

    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(owner, torch.Size) and name == "numel":
            return owner.numel()
        if not isinstance(owner, torch.Tensor):
            raise GraphRefused(
                f"the method .{name}() is called on a {type(owner).__name__}: a tensor was expected"
            )
        return method(owner, *args, **kwargs)

    return call


def _attribute(value: Any, name: str) -> Any:
    """Read an attribute that this kind of value may show."""
    match value:
        case torch.Tensor():
            readable: Any = allow_list.TENSOR_ATTRIBUTES
        case torch.finfo() | torch.iinfo():
            readable = allow_list.LIMIT_FIELDS
        case tuple():
            readable = getattr(type(value), "__match_args__", ())
        case Mapping():
            return targets.field(value, name)
        case _:
            readable = ()
    if name not in readable:
        raise GraphRefused(f"the attribute .{name} of a {type(value).__name__} cannot be read")
    return getattr(value, name)


def _reader(form: Any, device: torch.device) -> _Reader:
    """Turn an argument's JSON form into what reads it when the graph runs."""
    if isinstance(form, list):
        readers = [_reader(item, device) for item in form]
        return lambda values: [read(values) for read in readers]
    if not isinstance(form, dict):
        return lambda values: form
    ((tag, inner),) = form.items()
    match tag:
        case "node":
            return lambda values: values[inner]
        case "tuple":
            entries = _reader(inner, device)
            return lambda values: tuple(entries(values))
        case "slice":
            parts = _reader(inner, device)
            return lambda values: slice(*parts(values))
        case "dict":
            pairs = [(key, _reader(item, device)) for key, item in inner]
            return lambda values: {key: read(values) for key, read in pairs}
    literal = _literal(tag, inner, device)
    return lambda values: literal


def _literal(tag: str, inner: Any, device: torch.device) -> Any:
    match tag:
        case "dtype" | "memory_format":
            return getattr(torch, inner)
        case "device":
            return device
        case "float":
            return float(inner)
        case "complex":
            return complex(*inner)
        case _:
            return ...


def _last_uses(graph: Graph) -> list[list[str]]:
    """Return for every node the names that are read there for the last time."""
    last_used: list[list[str]] = []
    needed = set(_reads(graph.nodes[-1]))
    for node in reversed(graph.nodes[:-1]):
        reads = set(_reads(node))
        unused = set() if node.name in needed or node.op == "placeholder" else {node.name}
        last_used.append(sorted((reads - needed) | unused))
        needed |= reads
    return [*reversed(last_used), []]


def _reads(node: Node) -> list[str]:
    found: list[str] = []
    pending: list[Any] = [*node.args, *node.kwargs.values()]
    while pending:
        form = pending.pop()
        if isinstance(form, list):
            pending.extend(form)
        elif isinstance(form, dict):
            ((tag, inner),) = form.items()
            if tag == "node":
                found.append(inner)
            elif isinstance(inner, list):
                pending.extend(inner)
    return found


def _writes(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in allow_list.IN_PLACE
    return node.op == "call_function" and function_writes(node.target, node.args, node.kwargs)
