"""How a model of the models file is made: one function for each kind of builder.

Every builder gives an nn.Module in eval mode whose weights came from a safetensors file, or from
the model's own initialisation under a fixed seed, so that its version is the same in each process.
Downloaded code never runs: `trust_remote_code` is off and cannot be switched on.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from gradbox_worker.errors import ModelsFileError
from gradbox_worker.models.models_file import Builder, ModelEntry
from gradbox_worker.models.weight_index import wrong_indices

INITIAL_SEED: Final = 0


def build_model(entry: ModelEntry) -> nn.Module:
    """Build an entry's model on the CPU, with its weights, in eval mode.

    Raises:
        ModelsFileError: a package is missing, the source is not there, it does not return a
            module, the weights do not fit, or an entry point does not exist. What the model's own
            code raises comes through as it is.
    """
    with _seeded():
        model = BUILD[entry.builder](entry)
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


def _build_hf(entry: ModelEntry) -> nn.Module:
    transformers = _package(entry, "transformers")
    kwargs = dict(entry.kwargs)
    auto_class = kwargs.pop("auto_class", "AutoModel")
    factory = getattr(transformers, str(auto_class), None)
    if not str(auto_class).startswith("AutoModel") or factory is None:
        raise ModelsFileError(
            f"models.{entry.name}.kwargs.auto_class: expected a class of transformers such as "
            f"AutoModel or AutoModelForMaskedLM, got {auto_class!r}"
        )
    kwargs.setdefault("dtype", torch.float32)
    folder = entry.folder / Path(entry.source).expanduser()
    if entry.source.startswith((".", "/", "~")) and not folder.is_dir():
        raise ModelsFileError(
            f"models.{entry.name}.source: expected a folder with config.json and "
            f"model.safetensors, found none at {folder}"
        )
    indexed = folder if folder.is_dir() else _folder_of_downloaded_index(entry)
    if indexed is not None and (wrong := wrong_indices(indexed)):
        raise ModelsFileError(f"models.{entry.name}.source: {'; '.join(wrong)}; correct the index")
    transformers.utils.logging.disable_progress_bar()  # a worker's log is not a terminal
    built: nn.Module = factory.from_pretrained(
        str(folder) if folder.is_dir() else entry.source,
        trust_remote_code=False,
        use_safetensors=True,
        **kwargs,
    )
    return built


def _folder_of_downloaded_index(entry: ModelEntry) -> Path | None:
    """Fetch a hub model's index of weights and return its folder; None if it has no index."""
    hub = _package(entry, "huggingface_hub")
    passed_on = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
    given = {name: entry.kwargs[name] for name in passed_on if name in entry.kwargs}
    variant = f".{entry.kwargs['variant']}" if entry.kwargs.get("variant") else ""
    name = f"model.safetensors.index{variant}.json"
    try:
        return Path(hub.hf_hub_download(entry.source, name, **given)).parent
    except (hub.errors.EntryNotFoundError, OSError, ValueError):
        return None  # where it is the source that cannot be found, transformers says so


def _build_torchvision(entry: ModelEntry) -> nn.Module:
    models = _package(entry, "torchvision.models")
    built: nn.Module = models.get_model(entry.source, weights=None, **entry.kwargs)
    return built


def _build_timm(entry: ModelEntry) -> nn.Module:
    timm = _package(entry, "timm")
    built: nn.Module = timm.create_model(entry.source, pretrained=False, **entry.kwargs)
    return built


def _build_python(entry: ModelEntry) -> nn.Module:
    built: nn.Module = _function_of(entry)(**entry.kwargs)
    return built


BUILD: Final[Mapping[Builder, Callable[[ModelEntry], nn.Module]]] = {
    "hf": _build_hf,
    "torchvision": _build_torchvision,
    "timm": _build_timm,
    "python": _build_python,
}


def _package(entry: ModelEntry, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ModelsFileError(
            f"models.{entry.name}: builder {entry.builder!r} expects the package {package!r}, "
            f"which cannot be imported ({error}); pip install {package}"
        ) from error


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
        module = _package(entry, place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ModelsFileError(
            f"models.{entry.name}.source: expected a function {name!r} in {place}, found none"
        )
    return function  # type: ignore[no-any-return]


def _module_of_file(entry: ModelEntry, path: Path) -> ModuleType:
    """Import a file under a name made of its path, so that two files may have one stem."""
    if not path.is_file():
        raise ModelsFileError(
            f"models.{entry.name}.source: expected a Python file, found none at {path}"
        )
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"gradbox_models_{digest}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
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
