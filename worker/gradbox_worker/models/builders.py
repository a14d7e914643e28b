"""How a model of the models file is made: one function for each kind of builder.

Every builder gives an nn.Module in eval mode whose weights came from a safetensors file, or from
the model's own initialisation under a fixed seed, so that its version is the same in each process.
Downloaded code never runs: `trust_remote_code` is off and cannot be switched on.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from gradbox_worker.errors import ModelsFileError
from gradbox_worker.models.hugging_face import build_hf
from gradbox_worker.models.models_file import Builder, ModelEntry
from gradbox_worker.models.packages import package

INITIAL_SEED: Final = 0


def build_model(entry: ModelEntry, *, over: Sequence[torch.device] = ()) -> nn.Module:
    """Build an entry's model with its weights, in eval mode.

    Args:
        over: the devices over which an `hf` model is spread; none: it is built on the CPU.

    Raises:
        ModelsFileError: a package is missing, the source is not there, it does not return a
            module, the weights do not fit, or an entry point does not exist. What the model's own
            code raises comes through as it is.
    """
    with _seeded():
        model = build_hf(entry, over=over) if over else BUILD[entry.builder](entry)
    if not isinstance(model, nn.Module):
        raise ModelsFileError(
            f"models.{entry.name}: expected {entry.source!r} to return a torch.nn.Module, "
            f"got {type(model).__name__}"
        )
    if entry.weights is not None:
        load_weights(model, entry.weights, name=entry.name)
    for method in entry.methods:
        if not callable(getattr(model, method, None)):
            raise ModelsFileError(
                f"models.{entry.name}.methods: expected methods of {type(model).__name__}, "
                f"got {method!r}; remove it or correct its spelling"
            )
    return model.eval()


def source_code_digest(entry: ModelEntry) -> str:
    """Return the SHA-256 of the file that defines a `python` model, and "" for other builders."""
    if entry.builder != "python":
        return ""
    file = inspect.getsourcefile(_function_of(entry))
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def load_weights(model: nn.Module, path: Path, *, name: str) -> None:
    """Copy a safetensors file into a model; every tensor of either must have its counterpart.

    Tied tensors may stand in the file under any one of their names, as `save_model` writes them.

    Raises:
        ModelsFileError: names or shapes differ, or the file is not safetensors; the message names
            at most five tensors.
    """
    where = f"models.{name}.weights ({path.name})"
    if not path.is_file():
        raise ModelsFileError(f"{where}: expected a file, found none at {path}; check the path")
    state = model.state_dict(keep_vars=True)
    wanted = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    try:
        with safe_open(path, framework="pt") as file:
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelsFileError(f"{where}: expected a safetensors file, got {error}") from None
    unexpected = sorted(found.keys() - wanted.keys())
    given = {id(wanted[key]) for key in found.keys() & wanted.keys()}
    missing = sorted(key for key, tensor in wanted.items() if id(tensor) not in given)
    misshapen = [
        f"{key} (model {tuple(wanted[key].shape)}, file {tuple(found[key].shape)})"
        for key in sorted(found.keys() & wanted.keys())
        if wanted[key].shape != found[key].shape
    ]
    for problem, keys in (
        ("tensors the file lacks", missing),
        ("tensors the model lacks", unexpected),
        ("tensors of another shape", misshapen),
    ):
        if keys:
            listed = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
            raise ModelsFileError(
                f"{where}: expected exactly the model's tensors, got {len(keys)} {problem}: "
                f"{listed}; check that kwargs build the architecture these weights belong to"
            )
    with torch.no_grad():
        for key, tensor in found.items():
            wanted[key].copy_(tensor)


def _build_torchvision(entry: ModelEntry) -> nn.Module:
    models = package(entry, "torchvision.models")
    _refuse_unknown(entry, models.list_models())
    built: nn.Module = models.get_model(entry.source, weights=None, **entry.kwargs)
    return built


def _build_timm(entry: ModelEntry) -> nn.Module:
    timm = package(entry, "timm")
    _refuse_unknown(entry, timm.list_models())
    built: nn.Module = timm.create_model(entry.source, pretrained=False, **entry.kwargs)
    return built


def _refuse_unknown(entry: ModelEntry, known: Sequence[str]) -> None:
    name = entry.source.partition(".")[0]  # timm: ARCHITECTURE.TAG, where the tag names weights
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "see its list_models()"
    raise ModelsFileError(
        f"models.{entry.name}.source: expected an architecture that the installed {entry.builder} "
        f"knows, got {entry.source!r}; {hint}"
    )


def _build_python(entry: ModelEntry) -> nn.Module:
    built: nn.Module = _function_of(entry)(**entry.kwargs)
    return built


BUILD: Final[Mapping[Builder, Callable[[ModelEntry], nn.Module]]] = {
    "hf": build_hf,
    "torchvision": _build_torchvision,
    "timm": _build_timm,
    "python": _build_python,
}


def _function_of(entry: ModelEntry) -> Callable[..., Any]:
    place, colon, name = entry.source.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ModelsFileError(
            f'models.{entry.name}.source: expected "file.py:function" or '
            f'"package.module:function", got {entry.source!r}'
        )
    if place.endswith(".py"):
        module = _module_of_file(entry, entry.folder / Path(place).expanduser())
    else:
        module = package(entry, place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ModelsFileError(
            f"models.{entry.name}.source: expected a function {name!r} in {place}, found none"
        )
    return function  # type: ignore[no-any-return]


def _module_of_file(entry: ModelEntry, path: Path) -> ModuleType:
    """Import a file under a name made of its path and content.

    So two files may have one stem, and a file that has changed is read again.
    """
    if not path.is_file():
        raise ModelsFileError(
            f"models.{entry.name}.source: expected a Python file, found none at {path}"
        )
    digest = hashlib.sha256(str(path.resolve()).encode() + path.read_bytes()).hexdigest()[:12]
    name = f"gradbox_models_{digest}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _FromSource(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or spec.loader is None:
        raise ModelsFileError(f"models.{entry.name}.source: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and inspect look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _FromSource(SourceFileLoader):
    """Compiles a file each time: Python's cache tells versions apart by size and second alone."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


@contextmanager
def _seeded() -> Iterator[None]:
    """Draw initial weights from one seed, and leave the caller's generators as they were."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(INITIAL_SEED)
        random.seed(INITIAL_SEED)
        try:
            yield
        finally:
            random.setstate(state)
