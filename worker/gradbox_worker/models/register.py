"""Writes a model's block into models.toml, and leaves comments and all other blocks as they are."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from gradbox.written_files import read_written
from gradbox_worker.errors import ModelsFileError
from gradbox_worker.models.models_file import ModelEntry, Registered, read_entry


def new_table(
    source: str,
    *,
    models: Path,
    builder: str | None,
    kwargs: Sequence[str] = (),
    weights: Path | None = None,
    methods: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the table of a new model.

    Args:
        source: as given on the command line: paths in it start in the current folder.
        builder: None chooses "python" for FILE.py:FUNCTION and PACKAGE:FUNCTION, else "hf".
        kwargs: each KEY=VALUE, the value in TOML, or a string as it is.
    """
    place, colon, function = source.rpartition(":")
    builder = builder or ("python" if colon and function.isidentifier() else "hf")
    if builder == "python" and place.endswith(".py"):
        source = f"{_from(models, Path(place))}:{function}"
    elif builder == "hf" and Path(source).expanduser().exists():
        source = _from(models, Path(source))
    table: dict[str, Any] = {"builder": builder, "source": source}
    if kwargs:
        table["kwargs"] = dict(map(_keyword, kwargs))
    if weights is not None:
        table["weights"] = _from(models, weights)
    if methods:
        table["methods"] = list(methods)
    return table


def entry_of(models: Path, name: str, table: Mapping[str, Any]) -> ModelEntry:
    """Return what a new table says, checked as one in the file.

    Raises:
        ModelsFileError: a value is of the wrong kind.
    """
    return read_entry(models, name, dict(table), models.resolve().parent)


def holds(models: Path, name: str) -> bool:
    """Return whether a models file has a block of this name; one that is not there has none."""
    return name in _document(models).get("models", {})


def write_table(models: Path, name: str, table: Mapping[str, Any]) -> None:
    """Add a block, or replace the values of the one of this name.

    Raises:
        ModelsFileError: the file is not TOML in UTF-8.
        OSError: it cannot be written.
    """
    document = _document(models)
    tables: Any = document.setdefault("models", tomlkit.table(is_super_table=True))
    block = tables.setdefault(name, tomlkit.table())
    for key in [key for key in block if key not in table]:
        del block[key]
    for key, value in table.items():
        block[key] = _inline(value) if isinstance(value, Mapping) else value
    _write(models, tomlkit.dumps(document))


def note_registered(models: Path, found: Mapping[str, Registered]) -> None:
    """Write what models are now into their blocks.

    Raises:
        ModelsFileError, OSError: as for `write_table`.
    """
    document: Any = _document(models)
    for name, registered in found.items():
        document["models"][name]["registered"] = _inline(vars(registered))
    _write(models, tomlkit.dumps(document))


def _document(models: Path) -> tomlkit.TOMLDocument:
    try:
        return tomlkit.parse(read_written(models))
    except FileNotFoundError:
        return tomlkit.document()
    except (TOMLKitError, ValueError) as error:
        raise ModelsFileError(f"{models}: expected TOML, got: {error}") from None


def _write(models: Path, text: str) -> None:
    """Replace the file at once: a worker that reads it sees the old one or the new one."""
    target = models.resolve()  # a link stays one
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o777)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _inline(values: Mapping[str, Any]) -> Any:
    table = tomlkit.inline_table()
    table.update(values)
    return table


def _keyword(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise ModelsFileError(f"--kwarg: expected KEY=VALUE, got {text!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _from(models: Path, path: Path) -> str:
    """Return a path as it is written in the models file: relative where it lies beside or below."""
    whole, folder = path.expanduser().resolve(), models.resolve().parent
    return f"./{whole.relative_to(folder)}" if whole.is_relative_to(folder) else str(whole)
