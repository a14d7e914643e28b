"""What `import gradbox` gives, and what it costs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradbox
from tests.boxes import ROOT


@pytest.mark.parametrize("name", gradbox.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(gradbox, name) is not None


def test_every_error_of_the_tree_is_public() -> None:
    pending = [gradbox.GradboxError]
    while pending:
        error = pending.pop()
        pending += [e for e in error.__subclasses__() if e.__module__ == "gradbox.errors"]
        assert error.__name__ in gradbox.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        gradbox.no_such_name  # noqa: B018


def test_submitting_arrays_needs_no_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None          # as where torch is not installed
import numpy as np
from gradbox import Builtin, GradClient, Gradient
labels = np.arange(4)
shards = [np.ones((2, 3), np.float32)] * 2
prepared = Gradient(
    model="m", inputs=shards, loss=Builtin("cross_entropy"), loss_inputs={"labels": labels}
).prepare()
assert len(prepared.blobs) == 2, prepared
assert GradClient("http://127.0.0.1:1", "token")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)


def test_without_torch_a_function_says_what_to_install() -> None:
    code = """
import sys
sys.modules["torch"] = None
import numpy as np
from gradbox import Gradient, InvalidJob
try:
    Gradient(model="m", inputs=[np.ones(3)], loss=lambda z: z.sum()).prepare()
except InvalidJob as error:
    assert "gradbox[torch]" in str(error), error
else:
    raise SystemExit("traced without torch")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)


@pytest.mark.parametrize(
    "line",
    ["from gradbox.losses import info_nce", "GradClient('http://127.0.0.1:1', 't').model('m')"],
)
def test_what_needs_torch_says_how_to_install_it(line: str) -> None:
    code = f"""
import sys
sys.modules["torch"] = None
from gradbox import GradClient
try:
    {line}
except ModuleNotFoundError as error:
    assert "pip install 'gradbox[torch]', or" in str(error), error
else:
    raise SystemExit("it took no torch")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)


def test_importing_is_quick_because_it_loads_only_the_errors() -> None:
    code = "import sys, gradbox; print(sorted(m for m in sys.modules if m.startswith('gradbox')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['gradbox', 'gradbox.errors', 'gradbox.printable']"


def test_a_type_checker_sees_the_names_that_are_loaded_lazily() -> None:
    tree = ast.parse(Path(gradbox.__file__).read_text())
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imported = {
        alias.asname: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert imported.pop("losses") == "gradbox"
    assert imported == gradbox._LAZY
    eager = {name for name in gradbox.__all__ if is_error(name)}
    assert set(gradbox.__all__) == {*imported, *eager, "losses"}


def is_error(name: str) -> bool:
    found = getattr(gradbox, name)
    return isinstance(found, type) and issubclass(found, gradbox.GradboxError)


REVEALED = {
    "gradbox.MixedGradient(model='m', inputs=[], inner=len, outer=len)": "MixedGradient",
    "gradbox.GradClient().submit(g)": "Job",
    "gradbox.GradClient().submit(g).result()": "GradResult",
    "gradbox.GradClient().submit(g).result().loss": "float",
    "gradbox.GradClient().batch()": "Batch",
    "gradbox.GradClient().batch().results()": "list[GradResult | GradboxError]",
    "await gradbox.GradClient().submit(g)": "GradResult",
    "await gradbox.AsyncGradClient().submit(g)": "AsyncJob",
    "await (await gradbox.AsyncGradClient().submit(g))": "GradResult",
    "gradbox.losses.info_nce": "def",
    "gradbox.pack": "def",
}


@pytest.mark.slow
def test_mypy_reveals_the_types_of_public_calls(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    lines = [f"    reveal_type({expression})" for expression in REVEALED]
    lines += [f"    reveal_type(gradbox.{name})" for name in gradbox.__all__ if name != "losses"]
    head = ["import gradbox", "async def main(g: gradbox.Gradient) -> None:"]
    snippet.write_text("\n".join([*head, *lines]))
    sources = Path(gradbox.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(snippet)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(sources)},
        check=False,
    )
    notes = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert done.returncode == 0, done.stdout
    assert len(notes) == len(lines), done.stdout
    for line, (expression, expected) in zip(notes, REVEALED.items(), strict=False):
        plain = re.sub(r"gradbox\.[a-z_.]+\.", "", line)
        assert expected in plain, (expression, line)
    assert not [line for line in notes if '"Any"' in line]
