"""Rules that hold for the whole tree, each checked where it could be broken."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for folder in ("client", "service", "worker") for path in (ROOT / folder).rglob("*.py")
)
TORCH_PRIVATE = "worker/gradbox_engine/torch_private.py"
ROOMS = sorted(path.parent for path in SOURCES if path.name == "__init__.py")
UNPICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
LONGEST_FILE = 500
# Most lines of Python that each package may have, docstrings and blank lines among them. Each line
# is read by everybody who comes later: a feature brings its own by taking others out. A number is
# raised in a commit that says what was bought, and lowered whenever there is less.
MOST_LINES = {
    "client/gradbox": 20_250,
    "client/gradbox_factors": 2_250,
    "service/gradbox_service": 15_900,
    "worker/gradbox_engine": 18_100,
    "worker/gradbox_worker": 17_650,
}
SHORTEST_FILE = 25
IMPORT_S = 0.15

# Shorter than that, each for the reason beside it.
SHORT = {
    "client/gradbox_factors/slabs.py": "how all kinds of terms cut what is read once",
    "worker/gradbox_worker/computations/factors.py": "what jobs, tests and benchmarks write alike",
}
# Classes of one name, each for the reason beside it: elsewhere one name means one thing.
ONE_NAME = {
    "GradientNotFinite": "what the engine raises, and what its user catches",
    "LossNotFinite": "what the engine raises, and what its user catches",
    "LossNotScalar": "what the engine raises, and what its user catches",
    "ModelCallFailed": "what the engine raises, and what its user catches",
    "NotPositiveDefinite": "what the engine raises, and what its user catches",
    "ReplayMismatch": "what the engine raises, and what its user catches",
    "Penalty": "with a function to be traced, and with the one that is built of its graph",
}
# What a package's file and `python -m` say in a few lines.
ALWAYS_SHORT = ("__init__.py", "__main__.py")


def named(path: Path) -> str:
    """Return a path as rules name it."""
    return str(path.relative_to(ROOT))


@cache
def parsed() -> list[tuple[str, ast.Module]]:
    """Return the name of each source file, and its syntax tree."""
    return [(named(path), ast.parse(path.read_text())) for path in SOURCES]


def modules_loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=500
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize(
    ("statement", "also_not"),
    [
        ("import gradbox, gradbox.protocol, gradbox.graphs.check, gradbox.cli", "redis"),
        (
            "import gradbox_service.http.app, gradbox_service.commands.service, "
            "gradbox_service.commands.up, gradbox_service.up.box",
            "transformers",
        ),
        (
            "import gradbox_worker.__main__, gradbox_worker.command, "
            "gradbox_worker.models.command, gradbox_worker.turns.worker, "
            "gradbox_worker.turns.turn, gradbox_worker.turns.main",
            "numpy",
        ),
        (
            "import gradbox_worker.cluster.__main__",
            "fastapi",
        ),
    ],
    ids=["client", "service", "worker", "head of a cluster"],
)
def test_import_loads_neither_torch_nor_ray(statement: str, also_not: str) -> None:
    assert not {"torch", "ray", also_not} & modules_loaded_by(statement)


def test_the_client_imports_none_of_the_others() -> None:
    loaded = modules_loaded_by("import gradbox, gradbox.cli")
    assert not {"gradbox_service", "gradbox_worker", "gradbox_engine"} & loaded


@pytest.mark.slow  # a time, which other work on the machine would falsify
def test_importing_the_client_takes_a_moment() -> None:
    def import_s() -> float:
        timed = (
            "import time; t = time.perf_counter(); import gradbox; print(time.perf_counter() - t)"
        )
        command = [sys.executable, "-c", timed]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert min(import_s() for _ in range(10)) <= IMPORT_S


def test_source_unpickles_nothing() -> None:
    assert {name: said for name, tree in parsed() if (said := _unpickling(tree))} == {}


def _unpickling(tree: ast.Module) -> list[str]:
    """Return what a module imports or calls that runs what it reads, by line."""
    said = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        if {name.partition(".")[0] for name in names} & UNPICKLERS:
            said.append(f"line {node.lineno}: imports {names}")
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name) and called.id in ("eval", "exec"):
            said.append(f"line {called.lineno}: calls {called.id}")
    return said


def test_a_rule_that_is_broken_is_seen() -> None:
    broken = "import os\nfrom pickle import loads\nexec('1')\nimport dill.source\n"
    lines = {said.split(":")[0] for said in _unpickling(ast.parse(broken))}
    assert lines == {"line 2", "line 3", "line 4"}


def test_a_file_holds_one_idea() -> None:
    num_lines = {named(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: n for name, n in num_lines.items() if n > LONGEST_FILE} == {}
    short = {name for name, n in num_lines.items() if n < SHORTEST_FILE}
    assert {n for n in short if not n.endswith(ALWAYS_SHORT)} == SHORT.keys() & short


def test_private_names_of_torch_that_the_box_uses_stand_in_one_file() -> None:
    of_the_box = [(name, tree) for name, tree in parsed() if name.startswith("worker/")]
    used = {name: said for name, tree in of_the_box if (said := _private_names_of_torch(tree))}
    assert used.keys() == {TORCH_PRIVATE}, used


def test_a_private_name_of_torch_is_seen() -> None:
    broken = (
        "import torch._utils\nfrom torch._C import x\nself._version\nt._version\nn._saved_self\n"
    )
    lines = {said.split(":")[0] for said in _private_names_of_torch(ast.parse(broken))}
    assert lines == {"line 1", "line 2", "line 4", "line 5"}


def _private_names_of_torch(tree: ast.Module) -> list[str]:
    """Return those of its modules, of tensors and modules, and of what nodes of a graph saved."""
    import torch

    kinds = (torch.Tensor, torch.nn.Module(), torch.jit.ScriptModule)
    of_objects = {name for kind in kinds for name in dir(kind)} | {"_c", "_cdata"}
    used: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            used += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Attribute):
            used.append((node.lineno, ast.unparse(node)))
            is_own = ast.unparse(node.value) in ("self", "cls", "super()")
            if node.attr.startswith("_saved_") or (node.attr in of_objects and not is_own):
                used.append((node.lineno, f"torch.{node.attr}"))
    private = re.compile(r"torch(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")
    return [f"line {line}: {name}" for line, name in used if private.fullmatch(name)]


def test_no_package_outgrows_its_budget() -> None:
    num_lines = {
        package: sum(len(path.read_text().splitlines()) for path in (ROOT / package).rglob("*.py"))
        for package in MOST_LINES
    }
    assert {name: n for name, n in num_lines.items() if n > MOST_LINES[name]} == {}
    packages = {named(path.parent) for path in ROOT.glob("*/gradbox*/__init__.py")}
    assert packages == MOST_LINES.keys()


def test_no_two_classes_share_a_name() -> None:
    defined = [
        node.name
        for _, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    assert {name for name, times in Counter(defined).items() if times > 1} == ONE_NAME.keys()


def test_a_room_says_what_it_holds() -> None:
    assert [named(folder) for folder in ROOMS if not _said(folder)] == []


# Every module is a noun of the API, or there is one alone: the room's first line says enough.
LISTS_NO_MODULES = ("http/routes",)


def test_a_room_names_its_modules() -> None:
    unnamed = {
        f"{named(folder)}/{module}"
        for folder in ROOMS
        if not str(folder).endswith(LISTS_NO_MODULES)
        for module in {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
        if not re.search(rf"\b{module}\b", _said(folder))
    }
    assert unnamed == set()


def _said(folder: Path) -> str:
    """Return what a room's docstring and its page say."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    readme = folder / "README.md"
    return docstring + (readme.read_text() if readme.is_file() else "")


def test_every_command_is_in_the_readme_or_the_docs() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    commands = {entry.name for entry in metadata.entry_points(group="gradbox.commands")}
    assert commands >= {"up", "service", "worker", "models", "tokens", "demo"}
    assert not {name for name in commands if f"gradbox {name}" not in text}
