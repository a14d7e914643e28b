"""Every import of a tree, wherever it stands: in a function and under TYPE_CHECKING too."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

Graph = dict[str, set[str]]


def import_graph(folder: Path, package: str) -> Graph:
    """Return module → the modules of the same package that it imports."""
    paths = {_module_of(path, folder): path for path in (folder / package).rglob("*.py")}
    return {
        module: {found for found in _imported(path, paths) if found != module}
        for module, path in paths.items()
    }


def by_room(graph: Mapping[str, set[str]]) -> Graph:
    """Return room → the rooms that its modules import; a room is a child of the package.

    The package's own `__init__` is left out: it names what its rooms hold.
    """
    rooms: Graph = {}
    for module, imported in graph.items():
        if "." in module:
            found = rooms.setdefault(_room_of(module), set())
            found |= {_room_of(other) for other in imported if "." in other}
    return {room: found - {room} for room, found in rooms.items()}


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of nodes that reach each other, sorted (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            members = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(members) > 1:
                found.append(sorted(members))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found)


def _module_of(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` imports the module, not what the package's file holds.
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from {name if name in known else node.module} & known.keys()
