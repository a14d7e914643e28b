"""A traced function as JSON: the nodes of a torch.fx graph, with names in place of functions.

Here is the form; `allow_list` has the names that it may hold. `gradbox.tracing` makes such a graph
from a Python function, `gradbox_worker.interpreting` a function from such a graph: both need torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints

from gradbox.graphs.wire_form import Entries, Items, WireForm

MAX_NODES: Final = 5000

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]


class Node(WireForm, frozen=True):
    """One node.

    `target` is an argument's name (placeholder), a tensor's name (get_attr), a function's name from
    the allow-list (call_function) or a method's (call_method). An argument is a JSON scalar, a list
    or one of the tagged objects that docs/graphs.md lists, {"node": NAME} among them.
    """

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "output"]
    name: Name
    target: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    args: list[Any] = []  # noqa: RUF012  (pydantic copies a mutable default)
    kwargs: Entries[Name, Any] = {}  # noqa: RUF012


class Graph(WireForm, frozen=True):
    """The nodes of one function in the order in which they run; the last one is the output."""

    nodes: Annotated[Items[Node], Field(min_length=1, max_length=MAX_NODES)]
