"""Models stay loaded, leave when the budget says so, and are served at their version only."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gradbox.errors import UnknownModel, UnusableModel
from gradbox_engine import Group, ModelCallFailed, Objective, set_gradient
from gradbox_worker.models import read_models_file
from gradbox_worker.models.registry import Registry
from tests.worker import zoo

AFFINE_BYTES = 4 * (3 * 2 + 2)


def registry(folder: Path, *functions: str, budget_bytes: int | None = None) -> Registry:
    file = folder / "models.toml"
    file.write_text(
        "".join(
            f'[models.{function}]\nbuilder = "python"\nsource = "{zoo.__file__}:{function}"\n'
            for function in functions
        )
    )
    return Registry(read_models_file(file), device=torch.device("cpu"), budget_bytes=budget_bytes)


def test_a_model_is_built_once_and_stays(tmp_path: Path) -> None:
    models = registry(tmp_path, "affine")
    assert models.get("affine").module is models.get("affine").module


def test_the_description_lists_parameters_buffers_and_arguments(tmp_path: Path) -> None:
    (view,) = registry(tmp_path, "tied").describe()
    assert [p.name for p in view.parameters] == ["first.weight"]
    assert view.tied == {"second.weight": "first.weight"}
    assert [(b.name, b.shape, b.dtype) for b in view.buffers] == [("scale", [], "float32")]
    assert view.num_parameters == 9
    assert view.methods["forward"].arguments == view.methods["forward"].required == ["x"]


def test_the_least_recently_used_model_leaves_when_the_budget_is_exceeded(tmp_path: Path) -> None:
    # tied takes 40 bytes; two of the three fit.
    models = registry(tmp_path, "affine", "tied", "different_each_time", budget_bytes=80)
    affine, tied = models.get("affine").module, models.get("tied").module
    assert models.get("affine").module is affine
    models.get("different_each_time")
    assert models.get("affine").module is affine
    assert models.get("tied").module is not tied


def test_a_model_that_leaves_is_freed_where_cycles_are_left_out_of_garbage_collection(
    tmp_path: Path,
) -> None:
    models = registry(tmp_path, "affine", "tied")
    module = models.get("affine").module
    module.itself = [module]
    gone = weakref.ref(module)
    del module
    gc.freeze()
    assert models.drop_idle(but="tied", wanted_bytes=1) == ["affine"]
    assert gone() is None


def test_a_model_that_a_job_wrote_to_is_loaded_again(tmp_path: Path) -> None:
    models = registry(tmp_path, "clipped")
    first = models.get("clipped").module
    weight = first.get_parameter("linear.weight").detach().clone()
    group = Group("z", [{"x": torch.ones(2, 3)}])
    with pytest.raises(ModelCallFailed, match=r"'linear\.weight'"):
        set_gradient(first, [group], Objective(torch.sum), mode="train")
    again = models.get("clipped").module
    assert again is not first
    assert torch.equal(again.get_parameter("linear.weight"), weight)
    set_gradient(again, [group], Objective(torch.sum), mode="eval")
    assert models.get("clipped").module is again


def test_a_model_larger_than_the_budget_is_served_all_the_same(tmp_path: Path) -> None:
    assert registry(tmp_path, "affine", budget_bytes=1).get("affine").size_bytes == AFFINE_BYTES


def test_another_name_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"affine.*got 'bert'"):
        registry(tmp_path, "affine").get("bert")


def test_another_version_is_refused(tmp_path: Path) -> None:
    models = registry(tmp_path, "affine")
    version = models.get("affine").version
    assert models.get("affine", version).version == version
    assert models.get("affine", version[:8]).version == version
    for wrong in (version[:7], "0" * 64):
        with pytest.raises(UnknownModel, match="submit the job again"):
            models.get("affine", wrong)


def test_a_model_that_comes_back_different_is_refused(tmp_path: Path) -> None:
    models = registry(tmp_path, "affine", "different_each_time", budget_bytes=AFFINE_BYTES)
    models.describe()
    models.get("affine")
    with pytest.raises(UnknownModel, match="gradbox models reload"):
        models.get("different_each_time")


def test_a_model_that_cannot_be_built_says_why_and_the_rest_are_served(tmp_path: Path) -> None:
    models = registry(tmp_path, "raises", "affine")
    broken, whole = models.describe()
    assert (broken.name, broken.usable, broken.version) == ("raises", False, "")
    assert "raised KeyError: 'no such checkpoint' (line " in broken.reason
    assert whole.usable
    assert whole.version == models.get("affine").version
    with pytest.raises(UnusableModel, match="no such checkpoint"):
        models.get("raises")


def test_a_file_that_imports_what_is_not_installed_says_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("import no_such_package\n")
    file = tmp_path / "models.toml"
    file.write_text('[models.m]\nbuilder = "python"\nsource = "f.py:f"\n')
    (view,) = Registry(read_models_file(file), device=torch.device("cpu")).describe()
    assert "No module named 'no_such_package' (line 1 of " in view.reason
    assert "; install what it imports where the box runs, or" in view.reason


def test_models_that_are_known_are_not_built_again(tmp_path: Path) -> None:
    entries = registry(tmp_path, "raises", "affine", "tied")._entries
    began: list[str] = []
    later = Registry(
        entries,
        device=torch.device("cpu"),
        versions={"affine": "0" * 64},
        unusable={"raises": "it was so before"},
    )
    assert [view.name for view in later.describe(before=began.append)] == ["tied"] == began
    with pytest.raises(UnusableModel, match="it was so before"):
        later.get("raises")


def test_a_file_that_has_changed_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # whose cache misses such a change
    code = "import torch\ndef f():\n    return torch.nn.Linear(2, {})\n"
    file = tmp_path / "models.toml"
    file.write_text('[models.m]\nbuilder = "python"\nsource = "f.py:f"\n')
    shapes = []
    for out in (3, 4):
        (tmp_path / "f.py").write_text(code.format(out))
        (view,) = Registry(read_models_file(file), device=torch.device("cpu")).describe()
        shapes.append(view.parameters[0].shape)
    assert shapes == [[3, 2], [4, 2]]


def version_of(folder: Path, code: str) -> str:
    """Return the version of the model `m` that `f.py` builds in a process that begins now."""
    (folder / "f.py").write_text(code)
    file = folder / "models.toml"
    file.write_text('[models.m]\nbuilder = "python"\nsource = "f.py:f"\n')
    (view,) = Registry(read_models_file(file), device=torch.device("cpu")).describe()
    assert view.usable, view.reason
    return view.version


SCALED = """
from pathlib import Path

import torch

class Net(torch.nn.Linear):
    def forward(self, x):
        return {factor} * super().forward(x)

{decorator}
def f():
    {first}
    return Net(2, 3)
"""


def test_a_file_that_changes_while_its_model_is_built_gives_the_version_of_what_was_built(
    tmp_path: Path,
) -> None:
    later = SCALED.format(factor=3, decorator="", first="pass")
    rewrite = f"Path(__file__).write_text({later!r})"
    while_it_changed = version_of(tmp_path, SCALED.format(factor=2, decorator="", first=rewrite))
    assert (tmp_path / "f.py").read_text() == later
    assert while_it_changed != version_of(tmp_path, later)


def test_the_code_of_a_decorated_builder_counts(tmp_path: Path) -> None:
    once, twice = (
        version_of(tmp_path, SCALED.format(factor=n, decorator="@torch.no_grad()", first="pass"))
        for n in (1, 2)
    )
    assert once != twice


def test_a_builder_that_gives_one_module_twice_makes_two_models_of_it(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "import torch\nSHARED = torch.nn.Linear(2, 3)\ndef f():\n    return SHARED\n"
    )
    blocks = []
    for name, value in (("ones", 1.0), ("twos", 2.0)):
        weights = {"weight": torch.full((3, 2), value), "bias": torch.full((3,), value)}
        save_file(weights, tmp_path / f"{name}.safetensors")
        blocks.append(
            f'[models.{name}]\nbuilder = "python"\nsource = "f.py:f"\n'
            f'weights = "{name}.safetensors"\n'
        )
    file = tmp_path / "models.toml"
    file.write_text("".join(blocks))
    models = Registry(read_models_file(file), device=torch.device("cpu"))
    ones, twos = models.describe()
    for view, value in ((ones, 1.0), (twos, 2.0)):
        (bias,) = (p for n, p in models.get(view.name).module.named_parameters() if n == "bias")
        assert bias.tolist() == [value] * 3
        assert models.get(view.name, view.version).version == view.version
