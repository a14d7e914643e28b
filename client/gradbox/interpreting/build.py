"""From a graph and its tensors to a function.

The function is an interpreter over the graph's nodes: it looks each operation up in the allow-list
and calls it. No source code is generated and none is evaluated. Autograd sees the same calls in the
same order as it would have seen from the Python function, so value and gradients are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import torch

from gradbox.errors import GraphRefused, InvalidInputs
from gradbox.graphs import allow_list, targets
from gradbox.graphs.argument_rules import writes_in_place
from gradbox.graphs.check import arguments_of, check_graph
from gradbox.graphs.schema import Graph, Node
from gradbox.interpreting.bounded_arithmetic import bounded
from gradbox.interpreting.in_place_copies import Copies, uncopied

_Values = dict[str, Any]
_Reader = Callable[[_Values], Any]

# Where the values of a run keep the caller's grad mode, its copies, and the tensors that the graph
# was built with; no node has such a name.
_OUTER: Final = ""
_COPIES: Final = "="
_TENSORS: Final = "#"

# A loss comes back with every step of a training loop. Of larger graphs no program is kept.
_KEPT_PROGRAMS: Final = 32
_KEPT_CHARACTERS: Final = 2**16


def build(
    graph: Graph,
    tensors: Mapping[str, torch.Tensor],
    *,
    device: torch.device | str,
    buffers: Collection[str] = (),
) -> GraphFunction:
    """Make a function of a graph.

    Args:
        graph: what `trace` made, or what a client posted: it is checked first.
        tensors: the constants and parameters it reads, by name. Those that require grad
            get gradients.
        device: where the function runs; its factories (`torch.eye`) make their tensors there,
            whatever device its author had.
        buffers: the names of tensors whose values after a call are wanted: `GraphFunction.buffers`.

    Raises:
        GraphRefused: `check_graph` refuses it.
    """
    text = repr(graph.model_dump())
    program = _program if len(text) <= _KEPT_CHARACTERS else _program.__wrapped__
    made = program(_Posted(text, graph), frozenset(tensors), torch.device(device))
    return GraphFunction(made, tensors, buffers)


class GraphFunction:
    """A graph that can be called, with its arguments by position or by name.

    Where the graph writes in place, it works on copies: the tensors that it is given, at any depth,
    and those that it was built with are as they were after every call.

    Attributes:
        arguments: the names of its arguments in order.
        buffers: what the last call left in each tensor named as a buffer, without its graph. Before
            the first call it is empty.
    """

    def __init__(
        self, program: _Program, tensors: Mapping[str, torch.Tensor], buffers: Collection[str]
    ) -> None:
        self.arguments = program.arguments
        self.buffers: dict[str, torch.Tensor] = {}
        self._program = program
        self._tensors = {name: tensors[name].to(program.device) for name in program.reads}
        self._kept = [name for name in program.reads if name in buffers]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph.

        Raises:
            InvalidInputs: the arguments given are not the graph's.
        """
        grad_enabled = torch.is_grad_enabled()
        values = {_OUTER: grad_enabled, _COPIES: Copies(grad_enabled=grad_enabled)}
        values[_TENSORS] = self._tensors
        values |= self._bind(args, kwargs, values)
        program = self._program
        try:
            for step in program.steps:
                try:
                    values[step.name] = step.run(values)
                except Exception as error:
                    error.add_note(f"operation: {step.operation}")
                    raise
                for name in step.last_used:
                    del values[name]
            self.buffers = {
                name: program.own(self._tensors[name], values).detach() for name in self._kept
            }
            return uncopied(program.output(values))
        finally:
            torch.set_grad_enabled(grad_enabled)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any], values: _Values) -> _Values:
        by_position = dict(zip(self.arguments, args, strict=False))
        given = {**by_position, **kwargs}
        if (
            set(given) != set(self.arguments)
            or len(args) > len(self.arguments)
            or by_position.keys() & kwargs
        ):
            raise InvalidInputs(
                f"the function's arguments are {', '.join(self.arguments) or 'none'}; it got "
                f"{len(args)} by position and by name: {', '.join(kwargs) or 'none'}"
            )
        return {
            name: self._program.own(given[argument], values)
            for name, argument in zip(self._program.names, self.arguments, strict=True)
        }


@dataclass(frozen=True)
class _Posted:
    """A graph; two are the same where `text` is."""

    text: str
    graph: Graph = field(compare=False)


@lru_cache(_KEPT_PROGRAMS)
def _program(posted: _Posted, tensors: frozenset[str], device: torch.device) -> _Program:
    """Check a graph and make its program; raises as `check_graph` does."""
    check_graph(posted.graph, tensors)
    return _Program(posted.graph, device)


class _Program:
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

    def own(self, value: Any, values: _Values) -> Any:
        """Return a value that the graph may write into."""
        return values[_COPIES].of(value) if self._writes else value

    def _operation(self, node: Node, device: torch.device) -> _Reader:
        if node.op == "get_attr":
            target = node.target
            return lambda values: self.own(values[_TENSORS][target], values)
        if node.target == allow_list.GRAD_MODE:
            enabled = node.args[0]
            return lambda values: torch._C._set_grad_enabled(enabled and values[_OUTER])
        return _call(node, device)


class _Call:
    """Calls one function of the allow-list."""

    def __init__(
        self, function: Callable[..., Any], args: list[_Reader], kwargs: dict[str, _Reader]
    ) -> None:
        self._function = function
        self._args = args
        self._kwargs = kwargs

    def __call__(self, values: _Values) -> Any:
        args = [read(values) for read in self._args]
        kwargs = {name: read(values) for name, read in self._kwargs.items()}
        return self._function(*args, **kwargs)


@dataclass(frozen=True)
class _Step:
    name: str
    operation: str  # for messages
    run: _Reader
    last_used: tuple[str, ...]  # values that no later step reads: deleted after it


def _call(node: Node, device: torch.device) -> _Reader:
    args = [_reader(value, device) for value in node.args]
    kwargs = {name: _reader(value, device) for name, value in node.kwargs.items()}
    if node.op == "call_method":
        return _Call(_method(node.target), args, kwargs)
    if node.target in allow_list.FACTORIES and not node.target.endswith("_like"):
        kwargs["device"] = _reader({"device": "job"}, device)
    return _Call(_function(node.target), args, kwargs)


def _function(name: str) -> Callable[..., Any]:
    if name == allow_list.ATTRIBUTE:
        return _attribute
    return bounded(name, _installed(name, targets.FUNCTIONS.get(name)))


def _installed(name: str, function: Callable[..., Any] | None) -> Callable[..., Any]:
    if function is None:
        raise GraphRefused(f"{name} is allowed, but torch {torch.__version__} of this box lacks it")
    return function


def _method(name: str) -> Callable[..., Any]:
    method = bounded(name, _installed(name, getattr(torch.Tensor, name, None)))

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
    return (
        (node.op == "call_method" and node.target in allow_list.IN_PLACE)
        or (node.op == "call_function" and node.target in allow_list.WRITING_FUNCTIONS)
        or (node.op == "call_function" and writes_in_place(node.target, node.args, node.kwargs))
    )
