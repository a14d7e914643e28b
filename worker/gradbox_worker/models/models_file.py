"""models.toml, as the box's owner writes it.

    [models.minilm]
    builder = "hf"                      # hf | torchvision | timm | python
    source  = "sentence-transformers/all-MiniLM-L6-v2"
    kwargs  = {}                        # optional
    weights = "minilm.safetensors"      # optional
    methods = ["forward"]               # optional
    gpus_per_device = 4                 # optional, of hf: over so many GPUs of one device
    registered = {version = "…", weights = "…"}   # as `gradbox models add` found it

Paths are relative to the file. Reading it builds nothing and imports no torch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from gradbox.written_files import read_written
from gradbox_worker.errors import ModelsFileError

Builder = Literal["hf", "torchvision", "timm", "python"]

BUILDERS: Final[tuple[str, ...]] = get_args(Builder)
KEYS: Final = ("builder", "source", "kwargs", "weights", "methods", "gpus_per_device", "registered")
DIGEST: Final = re.compile(r"[0-9a-f]{64}")
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

# What would run code or unpickle weights from a download, or undo what the builder fixes.
REFUSED_KWARGS: Final[Mapping[str, tuple[str, ...]]] = {
    "hf": ("trust_remote_code", "code_revision", "use_safetensors", "weights_only"),
    "torchvision": ("weights", "pretrained", "progress"),
    "timm": ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay"),
    "python": (),
}


@dataclass(frozen=True)
class Registered:
    """What a model was when it was registered: `gradbox models verify` compares, no worker does."""

    version: str
    weights: str  # the digest of its weights alone; see `version.weights_digest`


@dataclass(frozen=True)
class ModelEntry:
    """One `[models.NAME]` table."""

    name: str
    builder: Builder
    source: str
    folder: Path  # where the models file lies: relative paths start here
    kwargs: Mapping[str, Any]
    weights: Path | None  # a safetensors file, absolute
    methods: tuple[str, ...]  # the entry points that jobs may call
    registered: Registered | None = None
    gpus_per_device: int = 1  # over which the model is spread


def gpus_of_a_device(entries: Mapping[str, ModelEntry]) -> int:
    """Return how many GPUs a device has that can run all of these models."""
    return max((entry.gpus_per_device for entry in entries.values()), default=1)


def read_models_file(path: Path) -> dict[str, ModelEntry]:
    """Read a models file; the entries come in the file's order.

    Raises:
        ModelsFileError: no such file, not TOML, not UTF-8, an unknown key, or a wrong value.
    """
    try:
        document = tomllib.loads(read_written(path))
    except OSError as error:
        raise ModelsFileError(
            f"{path}: expected a models file, got {error.strerror}; "
            f"write one, or name another with --models"
        ) from None
    except ValueError as error:
        raise ModelsFileError(f"{path}: expected TOML, got: {error}") from None
    _refuse_unknown(f"{path}", document, ("models",))
    tables = document.get("models", {})
    if not isinstance(tables, dict) or not tables:
        raise ModelsFileError(
            f"{path}: expected at least one [models.NAME] table, got none; add one"
        )
    folder = path.resolve().parent
    return {name: read_entry(path, name, table, folder) for name, table in tables.items()}


def read_entry(path: Path, name: str, table: Any, folder: Path) -> ModelEntry:
    """Return what one table says.

    Args:
        path: the file, for messages.
        folder: where its paths start.

    Raises:
        ModelsFileError: an unknown key, or a value of the wrong kind.
    """
    where = f"{path}: models.{name}"
    if not NAME.fullmatch(name):
        raise ModelsFileError(
            f"{where}: expected a name of letters, digits, '.', '_' and '-' (at most 100, the "
            f"first a letter or digit), got {name!r}; rename it"
        )
    if not isinstance(table, dict):
        raise ModelsFileError(f"{where}: expected a table, got {table!r}; write [models.{name}]")
    _refuse_unknown(where, table, KEYS)
    builder = _text(where, table, "builder")
    if builder not in BUILDERS:
        raise ModelsFileError(
            f"{where}.builder: expected one of {', '.join(BUILDERS)}, got {builder!r}"
        )
    return ModelEntry(
        name=name,
        builder=builder,  # type: ignore[arg-type]  # one of BUILDERS, which are Builder's members
        source=_text(where, table, "source"),
        folder=folder,
        kwargs=_kwargs(where, table, builder),
        weights=_weights(where, table, folder),
        methods=_methods(where, table),
        registered=_registered(where, table),
        gpus_per_device=_gpus_per_device(where, table, builder),
    )


def _refuse_unknown(where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            raise ModelsFileError(
                f"{where}: expected only the keys {', '.join(known)}, got {key!r}; "
                f"remove it or correct its spelling"
            )


def _text(where: str, table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        got = "nothing" if value is None else repr(value)
        raise ModelsFileError(
            f'{where}.{key}: expected a non-empty string, got {got}; add {key} = "…"'
        )
    return value


def _kwargs(where: str, table: Mapping[str, Any], builder: str) -> dict[str, Any]:
    kwargs = table.get("kwargs", {})
    if not isinstance(kwargs, dict):
        raise ModelsFileError(
            f"{where}.kwargs: expected a table, got {kwargs!r}; write {{key = …}}"
        )
    for key in REFUSED_KWARGS[builder]:
        if key in kwargs:
            raise ModelsFileError(
                f"{where}.kwargs: expected anything but {key!r}, which is never allowed: gradbox "
                f"loads safetensors only and runs no downloaded code; remove it, and name a local "
                f"safetensors file with weights = … if the model needs one"
            )
    return kwargs


def _weights(where: str, table: Mapping[str, Any], folder: Path) -> Path | None:
    if "weights" not in table:
        return None
    text = _text(where, table, "weights")
    if not text.endswith(".safetensors"):
        raise ModelsFileError(
            f"{where}.weights: expected a .safetensors file, got {text!r}; "
            f"{convert_line(Path(text))}"
        )
    return folder / Path(text).expanduser()


def convert_line(path: Path) -> str:
    """Say how a checkpoint becomes a safetensors file; not on the box: unpickling runs code."""
    return (
        f"gradbox reads safetensors only; where you trust the file, convert it: python -c "
        f"'import torch; from safetensors.torch import save_file; "
        f's = torch.load("{path.name}", map_location="cpu"); s = s.get("state_dict", s); '
        f"save_file({{k: v.clone().contiguous() for k, v in s.items()}}, "
        f'"{path.stem}.safetensors")\''
    )


def _methods(where: str, table: Mapping[str, Any]) -> tuple[str, ...]:
    methods = table.get("methods", ["forward"])
    valid = isinstance(methods, list) and methods and all(isinstance(m, str) for m in methods)
    if not valid:
        raise ModelsFileError(
            f'{where}.methods: expected a list of method names, got {methods!r}; write ["forward"]'
        )
    for method in methods:
        if not method.isidentifier() or method.startswith("_"):
            raise ModelsFileError(
                f"{where}.methods: expected public method names of the model, got {method!r}"
            )
    if len(set(methods)) != len(methods):
        raise ModelsFileError(f"{where}.methods: expected each name once, got {methods!r}")
    return tuple(methods)


def _gpus_per_device(where: str, table: Mapping[str, Any], builder: str) -> int:
    if "device_map" in table.get("kwargs", {}) and builder == "hf":
        raise ModelsFileError(
            f"{where}.kwargs: expected no device_map, which is the box's business; for a model "
            f"that is larger than one GPU write gpus_per_device = 2, or more, beside source"
        )
    found = table.get("gpus_per_device", 1)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ModelsFileError(
            f"{where}.gpus_per_device: expected a whole number from 1, got {found!r}"
        )
    if found > 1 and builder != "hf":
        raise ModelsFileError(
            f"{where}.gpus_per_device: expected 1, for builder {builder!r} puts a model on one "
            f"GPU, got {found}; register it with builder hf, or remove the key"
        )
    return found


def _registered(where: str, table: Mapping[str, Any]) -> Registered | None:
    if "registered" not in table:
        return None
    given = table["registered"]
    valid = isinstance(given, dict) and given.keys() == {"version", "weights"}
    if not valid or not all(DIGEST.fullmatch(str(digest)) for digest in given.values()):
        raise ModelsFileError(
            f"{where}.registered: expected {{version = …, weights = …}} as `gradbox models add` "
            f"writes it, got {given!r}; remove it, or run `gradbox models verify --accept`"
        )
    return Registered(version=given["version"], weights=given["weights"])
