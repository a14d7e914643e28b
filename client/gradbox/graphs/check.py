"""What a graph must satisfy before anything of it runs. Torch-free: the service calls it too.

A graph that comes over the wire is a stranger's. `check_graph` reads it once, node by node, and
refuses what `allow_list` does not name, what is not in the order in which it runs, and what exceeds
the limits below. What depends on values (the size that a list repetition makes, the memory that an
operation takes) is bounded when the graph runs: `gradbox_worker.interpreting`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gradbox.errors import GraphRefused
from gradbox.graphs import allow_list
from gradbox.graphs.allow_list import WRITING_FUNCTIONS
from gradbox.graphs.schema import Graph, Node

_FUNCTIONAL: Final = "torch.nn.functional."
PLACES: Final[dict[str, dict[str, int]]] = {
    "torch.norm": {"out": 4},
    "torch.tensordot": {"out": 3},
    _FUNCTIONAL + "embedding": {"max_norm": 3},
    _FUNCTIONAL + "multi_head_attention_forward": {"dropout_p": 10},
    _FUNCTIONAL + "normalize": {"out": 4},
    _FUNCTIONAL + "scaled_dot_product_attention": {"dropout_p": 4},
    **{
        _FUNCTIONAL + name: {"inplace": place}
        for place, names in (
            (1, "hardsigmoid hardswish mish relu relu6 selu silu"),
            (2, "celu elu leaky_relu"),
            (3, "hardtanh threshold"),
        )
        for name in names.split()
    },
}


def argument(name: str, target: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument of that name in a call of a function of the allow-list, or None."""
    if name in kwargs:
        return kwargs[name]
    place = PLACES.get(target or "", {}).get(name, len(args))
    return args[place] if place < len(args) else None


def function_writes(target: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call of a function of the allow-list may write into one of its arguments.

    An `inplace` that is known only when the graph runs may be true.
    """
    in_place = argument("inplace", target, args, kwargs) not in (None, False)
    return in_place or target in WRITING_FUNCTIONS


MAX_DEPTH: Final = 8  # of lists and tagged objects inside one argument
MAX_LIST: Final = 1024  # entries of one list, tuple or keyword mapping
MAX_STRING: Final = 256  # characters: an einsum equation, a reduction's name, a field's
MAX_VALUES: Final = 100_000  # scalars, lists and objects in the arguments of the whole graph
MAX_INTEGER: Final = 2**63 - 1

_FUNCTIONS = frozenset(allow_list.FUNCTIONS)
_TWO_ARGUMENTS = frozenset({allow_list.ATTRIBUTE, allow_list.FIELD})


def check_graph(
    graph: Graph,
    tensors: Collection[str],
    *,
    positional: int | None = None,
    arguments: Collection[str] | None = None,
) -> None:
    """Refuse a graph that must not run.

    Args:
        graph: what a client posted, or what was traced.
        tensors: the names of the tensors that it may read.
        positional: how many of its arguments are given by position; unchecked when None.
        arguments: the names of those that are given by keyword; unchecked when None.

    Raises:
        GraphRefused: the message names the node, its operation and the rule.
    """
    names = frozenset(tensors)
    seen: set[str] = set()
    budget = _Budget()
    for index, node in enumerate(graph.nodes):
        if node.name in seen:
            raise _refusal(node, "the graph has this name twice: every node needs one of its own")
        _check_order(node, index, graph, seen)
        _check_target(node, names)
        for value in (*node.args, *node.kwargs.values()):
            budget.spend(value, node, seen, depth=1)
        seen.add(node.name)
    _check_arguments(graph, positional, arguments)


def arguments_of(graph: Graph) -> tuple[str, ...]:
    """Return the names of the graph's arguments in order."""
    return tuple(node.target for node in graph.nodes if node.op == "placeholder")


def _refusal(node: Node, rule: str) -> GraphRefused:
    return GraphRefused(f"node {node.name!r} ({node.op} {node.target!r}): {rule}")


def _check_order(node: Node, index: int, graph: Graph, seen: Collection[str]) -> None:
    last = index == len(graph.nodes) - 1
    if (node.op == "output") != last:
        raise _refusal(node, "a graph ends with its one output node, and with no other")
    if node.op == "placeholder" and seen and graph.nodes[index - 1].op != "placeholder":
        raise _refusal(node, "the arguments come first, before every other node")


def _check_target(node: Node, tensors: Collection[str]) -> None:
    if len(node.args) > MAX_LIST or len(node.kwargs) > MAX_LIST:
        raise _refusal(node, f"it has more than {MAX_LIST} arguments")
    match node.op:
        case "placeholder":
            if not node.target.isidentifier() or node.target.startswith("__"):
                raise _refusal(node, "an argument's name must be a plain identifier")
            _check_bare(node, num_args=0)
        case "get_attr":
            if node.target not in tensors:
                raise _refusal(
                    node,
                    f"the job gives the graph no tensor of that name; it gives {_few(tensors)}",
                )
            _check_bare(node, num_args=0)
        case "output":
            _check_bare(node, num_args=1)
        case "call_method":
            _check_method(node)
        case "call_function":
            _check_function(node)


def _check_bare(node: Node, *, num_args: int) -> None:
    if len(node.args) != num_args or node.kwargs:
        raise _refusal(node, f"such a node has {num_args} arguments and no keywords")


def _check_method(node: Node) -> None:
    if node.target not in allow_list.METHODS:
        raise _refusal(node, "no such method on the allow-list of tensor methods")
    if not node.args or not _is_node(node.args[0]):
        raise _refusal(node, "the first argument of a method is the node it is called on")
    _check_keywords(node)
    if node.target == "to" and any(map(names_device, (*node.args, *node.kwargs.values()))):
        raise _refusal(node, 'a device is written {"device": "job"}: a graph does not choose one')


def _check_function(node: Node) -> None:
    if node.target not in _FUNCTIONS:
        raise _refusal(node, "no such function on the allow-list")
    _check_keywords(node)
    if node.target in _TWO_ARGUMENTS:
        _check_attribute(node)
    if node.target == allow_list.GRAD_MODE and not (
        len(node.args) == 1 and isinstance(node.args[0], bool) and not node.kwargs
    ):
        raise _refusal(node, "it takes true or false and nothing else")


def _check_keywords(node: Node) -> None:
    for name, value in node.kwargs.items():
        if name in allow_list.FORBIDDEN_KEYWORDS:
            raise _refusal(node, f"the argument {name!r} is not allowed")
        if name == "device" and not (value is None or _is_node(value) or value == _DEVICE):
            raise _refusal(
                node, 'a device is written {"device": "job"}: a graph does not choose one'
            )
    for name in PLACES.get(node.target, {}):
        if name in allow_list.FORBIDDEN_KEYWORDS and (
            argument(name, node.target, node.args, {}) is not None
        ):
            raise _refusal(node, f"the argument {name!r} is not allowed, by position either")
    for name in allow_list.ZERO_KEYWORDS:
        if not is_zero(argument(name, node.target, node.args, node.kwargs)):
            raise _refusal(node, f"the argument {name!r} is 0: nothing random happens in a graph")


def _check_attribute(node: Node) -> None:
    if len(node.args) != 2 or node.kwargs or not _is_node(node.args[0]):
        raise _refusal(node, "it takes a node and a name")
    name = node.args[1]
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise _refusal(node, f"the attribute {name!r} is not a public name")
    if node.target == allow_list.ATTRIBUTE and name not in allow_list.ATTRIBUTES:
        raise _refusal(node, f"the attribute {name!r} is not on the allow-list")


def _check_arguments(
    graph: Graph, positional: int | None, arguments: Collection[str] | None
) -> None:
    names = arguments_of(graph)
    if len(set(names)) != len(names):
        raise GraphRefused(f"two arguments of the graph have one name: {', '.join(names)}")
    if positional is not None and len(names) < positional:
        raise GraphRefused(f"the graph takes {len(names)} arguments, and {positional} are given")
    if arguments is not None:
        keywords = names[positional or 0 :]
        if set(keywords) != set(arguments):
            raise GraphRefused(
                f"the graph's arguments are {_few(keywords)}, and the job gives "
                f"{_few(arguments)}: every one must be given, and no other"
            )


_DEVICE: Final = {"device": "job"}


def names_device(value: Any) -> bool:
    """Tell whether torch would read a value as a device: "cuda:1", or 1."""
    return isinstance(value, str | int) and not isinstance(value, bool)


def is_zero(value: Any) -> bool:
    """Tell whether an argument is left out or is the number 0, whatever the graph computes."""
    return value is None or (isinstance(value, int | float) and value == 0)


def _is_node(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["node"]


def _few(names: Collection[str]) -> str:
    shown = sorted(names)[:10]
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return (", ".join(repr(name) for name in shown) + more) or "none"


@dataclass
class _Budget:
    """Walks arguments and counts what they hold."""

    num_values: int = field(default=0)

    def spend(self, value: Any, node: Node, seen: Collection[str], *, depth: int) -> None:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise _refusal(node, f"the graph's arguments hold more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise _refusal(node, f"an argument is nested more than {MAX_DEPTH} deep")
        if isinstance(value, list):
            self._spend_all(value, node, seen, depth)
        elif isinstance(value, dict):
            self._spend_tagged(value, node, seen, depth)
        else:
            _check_scalar(value, node)

    def _spend_all(self, values: list[Any], node: Node, seen: Collection[str], depth: int) -> None:
        if len(values) > MAX_LIST:
            raise _refusal(node, f"a list has {len(values)} entries, more than {MAX_LIST}")
        for value in values:
            self.spend(value, node, seen, depth=depth + 1)

    def _spend_tagged(
        self, value: dict[Any, Any], node: Node, seen: Collection[str], depth: int
    ) -> None:
        if len(value) != 1:
            raise _refusal(node, f"an object has one key, its tag; got {_few(list(value))[:200]}")
        ((tag, inner),) = value.items()
        match tag:
            case "node":
                if not isinstance(inner, str) or inner not in seen:
                    raise _refusal(
                        node, f"it reads {inner!r:.200}, which no earlier node is called"
                    )
            case "tuple":
                self._spend_list(inner, node, seen, depth)
            case "slice":
                self._spend_list(inner, node, seen, depth)
                if len(inner) != 3:
                    raise _refusal(node, "a slice is [start, stop, step]")
            case "dict":
                self._spend_pairs(inner, node, seen, depth)
            case _:
                _check_literal(tag, inner, node)

    def _spend_list(self, value: Any, node: Node, seen: Collection[str], depth: int) -> None:
        if not isinstance(value, list):
            raise _refusal(node, f"a list was expected, got {type(value).__name__}")
        self._spend_all(value, node, seen, depth)

    def _spend_pairs(self, value: Any, node: Node, seen: Collection[str], depth: int) -> None:
        if node.op != "output":
            raise _refusal(node, "only the output may be a dict")
        if not isinstance(value, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in value
        ):
            raise _refusal(node, "a dict is a list of [key, value], each key a string")
        self._spend_all(value, node, seen, depth)


def _check_scalar(value: Any, node: Node) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        if len(value) > MAX_STRING:
            raise _refusal(node, f"a string has {len(value)} characters, more than {MAX_STRING}")
    elif isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise _refusal(node, "an integer does not fit into 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _refusal(node, f'a float that is not finite is written {{"float": "{value}"}}')
    else:
        raise _refusal(node, f"{type(value).__name__} is not a JSON value")


def _check_literal(tag: Any, inner: Any, node: Node) -> None:
    known: dict[str, Collection[Any]] = {
        "dtype": allow_list.DTYPES,
        "float": ("inf", "-inf", "nan"),
        "memory_format": allow_list.MEMORY_FORMATS,
        "device": ("job",),
    }
    if tag == "ellipsis" and inner is True:
        return
    if tag == "complex" and isinstance(inner, list) and len(inner) == 2:
        if all(isinstance(part, float) and math.isfinite(part) for part in inner):
            return
    elif tag in known and isinstance(inner, str) and inner in known[tag]:
        return
    raise _refusal(node, f"no such argument: {{{tag!r:.100}: {inner!r:.100}}}")
