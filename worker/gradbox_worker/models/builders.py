"""How a model of the models file is made: one function for each kind of builder.

Every builder gives an nn.Module in eval mode whose weights came from a safetensors file, or from
the model's own initialisation under a fixed seed, so that its version is the same in each process.
Downloaded code never runs: `trust_remote_code` is off and cannot be switched on.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import SourceFileLoader
from itertools import chain
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from gradbox.tensors.safetensors_header import other_format
from gradbox_worker.errors import ModelsFileError
from gradbox_worker.models.hugging_face import build_hf
from gradbox_worker.models.models_file import ModelEntry
from gradbox_worker.models.packages import package

INITIAL_SEED: Final = 0
# What DistributedDataParallel and torch.compile put before each name.
WRAPPERS: Final = ("module.", "_orig_mod.")


def build_model(entry: ModelEntry, *, over: Sequence[torch.device] = ()) -> nn.Module:
    """Build an entry's model; see `build_with_code`."""
    return build_with_code(entry, over=over)[0]


def build_with_code(
    entry: ModelEntry, *, over: Sequence[torch.device] = (), in_use: Iterable[nn.Module] = ()
) -> tuple[nn.Module, str]:
    """Build an entry's model with its weights, in eval mode.

    Args:
        over: the devices over which an `hf` model is spread; none: it is built on the CPU.
        in_use: models that are on the device. One that shares a tensor with them is copied, for
            the weights of one must not become those of another.

    Returns:
        The model, and the SHA-256 of the file that defines a `python` model, as it was when it was
        imported: it may have changed while the model was built. "" for other builders.

    Raises:
        ModelsFileError: a package is missing, the source is not there, it does not return a
            module, the weights do not fit, or an entry point does not exist. What the model's own
            code raises comes through as it is.
    """
    code = ""
    with _seeded():
        if over:
            model = build_hf(entry, over=over)
        elif entry.builder == "python":
            function, code = _function_of(entry)
            model = function(**entry.kwargs)
        else:
            model = BUILD[entry.builder](entry)
    if not isinstance(model, nn.Module):
        raise ModelsFileError(
            f"models.{entry.name}: expected {entry.source!r} to return a torch.nn.Module, "
            f"got {type(model).__name__}"
        )
    if not _tensors(model).isdisjoint(chain.from_iterable(map(_tensors, in_use))):
        model = copy.deepcopy(model)
    if entry.weights is not None:
        load_weights(model, entry.weights, name=entry.name)
    for method in entry.methods:
        if not callable(getattr(model, method, None)):
            raise ModelsFileError(
                f"models.{entry.name}.methods: expected methods of {type(model).__name__}, "
                f"got {method!r}; remove it or correct its spelling"
            )
    return model.eval(), code


def _tensors(model: nn.Module) -> set[int]:
    """Return which tensors a model holds."""
    return {id(tensor) for tensor in chain(model.parameters(), model.buffers())}


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
        raise ModelsFileError(
            f"{where}: expected a safetensors file, got {other_format(path) or error}"
        ) from None
    unexpected = sorted(found.keys() - wanted.keys())
    given = {id(wanted[key]) for key in found.keys() & wanted.keys()}
    missing = sorted(key for key, tensor in wanted.items() if id(tensor) not in given)
    misshapen = [
        f"{key} (model {tuple(wanted[key].shape)}, file {tuple(found[key].shape)})"
        for key in sorted(found.keys() & wanted.keys())
        if wanted[key].shape != found[key].shape
    ]
    wrapped = [p for p in WRAPPERS if found and all(key.startswith(p) for key in found)]
    advice = (
        f"its names begin with {wrapped[0]!r}, as those of a wrapped model do: save "
        f"model.{wrapped[0]}state_dict()"
        if wrapped
        else "check that kwargs build the architecture these weights belong to"
    )
    for problem, keys in (
        ("tensors the file lacks", missing),
        ("tensors the model lacks", unexpected),
        ("tensors of another shape", misshapen),
    ):
        if keys:
            listed = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
            raise ModelsFileError(
                f"{where}: expected exactly the model's tensors, got {len(keys)} {problem}: "
                f"{listed}; {advice}"
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


BUILD: Final[Mapping[str, Callable[[ModelEntry], nn.Module]]] = {
    "hf": build_hf,
    "torchvision": _build_torchvision,
    "timm": _build_timm,
}


def _function_of(entry: ModelEntry) -> tuple[Callable[..., Any], str]:
    """Return the function that builds a model, and the digest of the file that defines it."""
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
    # Of a decorated one it is the file of what is decorated, not the decorator's.
    named = inspect.unwrap(function)
    written = inspect.isfunction(named) or inspect.isclass(named)
    defined_in = sys.modules.get(named.__module__, module) if written else module
    return function, _source_digest(defined_in)


def _source_digest(module: ModuleType) -> str:
    """Return the SHA-256 of a module's source; that of nothing if it has none."""
    if isinstance(module.__loader__, _FromSource):
        return hashlib.sha256(module.__loader__.source).hexdigest()
    return _digest_when_imported(module.__name__, inspect.getsourcefile(module))


@cache
def _digest_when_imported(_name: str, file: str | None) -> str:
    """Return a file's digest when it was first asked for: the process runs what it read then."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def _module_of_file(entry: ModelEntry, path: Path) -> ModuleType:
    """Import a file under a name made of its path and content.

    So two files may have one stem, and a file that has changed is read again.
    """
    if not path.is_file():
        raise ModelsFileError(
            f"models.{entry.name}.source: expected a Python file, found none at {path}"
        )
    source = path.read_bytes()
    digest = hashlib.sha256(str(path.resolve()).encode() + source).hexdigest()[:12]
    name = f"gradbox_models_{digest}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _FromSource(name, str(path), source)
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
    """Compiles the bytes that it is given, whatever the file and Python's cache of it hold now."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.source, self.path)


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
