"""What a key of a job file may hold, read into what the computations take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gradbox.cli.job_file.files import NPY, REFERENCE, SAFETENSORS, Files
from gradbox.computations import Builtin, Cotangents, Penalty
from gradbox.errors import InvalidJob

PENALTY_KEYS: Final = frozenset({"at", "loss", "weight", "per_sample_scale"})


def shards(value: Any, *, key: str, files: Files) -> Any:
    """Read `inputs`: files and patterns, {argument: file} tables, or a table of groups of those."""
    if isinstance(value, Mapping):
        return {name: _listed(value[name], key=f"{key}.{name}", files=files) for name in value}
    return _listed(value, key=key, files=files)


def tensor(value: Any, *, key: str, files: Files) -> Any:
    """Read a tensor: the name of its file, or {file, requires_grad}."""
    if isinstance(value, Mapping):
        known(value, {"file", "requires_grad"}, key=key)
        found = tensor(value.get("file"), key=f"{key}.file", files=files)
        if value.get("requires_grad") is not True:
            return found
        import torch

        # torch.tensor copies without a warning what a .npy maps and nobody may write.
        copied = found.clone() if isinstance(found, torch.Tensor) else torch.tensor(found)
        return copied.requires_grad_()
    if not is_file_name(value):
        raise InvalidJob(
            f"{key}: expected FILE.npy, FILE.safetensors or FILE.safetensors:NAME, got {value!r}"
        )
    return files.tensor(value, key=key)


def tensor_or_group(value: Any, *, key: str, files: Files) -> Any:
    """Read one tensor, or a table of them."""
    if isinstance(value, Mapping) and "file" not in value:
        return {name: tensor(value[name], key=f"{key}.{name}", files=files) for name in value}
    return tensor(value, key=key, files=files)


def state_dict(value: Any, *, key: str, files: Files) -> Any:
    """Read `weights`: a .safetensors file, or a table of tensors by name."""
    if isinstance(value, str):
        return files.tensors(value, key=key)
    return tensor_or_group(value, key=key, files=files)


def function_inputs(value: Any, *, key: str, files: Files) -> dict[str, Any]:
    """Read what a function reads beside Z: files are tensors, all else stays as it is.

    A table of files is a tensor for each group.
    """
    found = {}
    for name, entry in table(value, key=key).items():
        is_tensor = is_file_name(entry) or isinstance(entry, Mapping)
        where = f"{key}.{name}"
        found[name] = tensor_or_group(entry, key=where, files=files) if is_tensor else entry
    return found


def loss(value: Any, *, key: str, files: Files) -> Any:
    """Read a loss: a built-in one's name, file.py:function, or a table that says which and how."""
    if isinstance(value, str):
        return files.function(value, key=key) if ":" in value else Builtin(value)
    given = dict(table(value, key=key))
    kinds = [kind for kind in ("builtin", "function", "cotangents") if kind in given]
    if len(kinds) != 1:
        raise InvalidJob(
            f"{key}: expected one of builtin, function and cotangents, got {sorted(given)}"
        )
    main = given.pop(kinds[0])
    if kinds[0] == "builtin":
        return Builtin(main, **given)
    if kinds[0] == "function":
        known(value, {"function"}, key=key)
        return files.function(main, key=f"{key}.function")
    known(value, {"cotangents", "of"}, key=key)
    if not isinstance(given.get("of"), str):
        raise InvalidJob(f"{key}.of: expected the id of a forward job, got {given.get('of')!r}")
    tensors = tensor_or_group(main, key=f"{key}.cotangents", files=files)
    return Cotangents(tensors, of=given["of"])


def function(value: Any, *, key: str, files: Files) -> Any:
    """Read file.py:function."""
    if not isinstance(value, str):
        raise InvalidJob(f"{key}: expected file.py:function, got {value!r}")
    return files.function(value, key=key)


def penalties(value: Any, *, key: str, files: Files) -> list[Penalty]:
    """Read an array of tables."""
    if not isinstance(value, list):
        raise InvalidJob(f"{key}: expected [[{key}]] tables, got {value!r}")
    found = []
    for index, entry in enumerate(value):
        where = f"{key}[{index}]"
        given = dict(known(table(entry, key=where), PENALTY_KEYS, key=where))
        for name in ("at", "loss"):
            if name not in given:
                raise InvalidJob(f"{where}.{name}: expected it, found none")
        for name in ("loss", "per_sample_scale"):
            if name in given:
                given[name] = function(given[name], key=f"{where}.{name}", files=files)
        found.append(Penalty(**given))
    return found


def plain(value: Any, *, key: str, files: Files) -> Any:
    """Leave a number, a string or a list as TOML has it: the computation says what it expects."""
    return value


def table(value: Any, *, key: str) -> Mapping[str, Any]:
    """Return a table.

    Raises:
        InvalidJob: it is none.
    """
    if not isinstance(value, Mapping):
        raise InvalidJob(f"{key}: expected a table [{key}], got {value!r}")
    return value


def known(given: Mapping[str, Any], names: frozenset[str] | set[str], *, key: str) -> Any:
    """Return a table that holds no other keys than these.

    Raises:
        InvalidJob: it holds one; the message names the closest.
    """
    from difflib import get_close_matches

    for name in given:
        if name not in names:
            where = f"{key}.{name}" if key else name
            close = get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InvalidJob(f"{where}: expected one of the keys {', '.join(sorted(names))}{hint}")
    return given


def is_file_name(value: Any) -> bool:
    """Tell whether a string names a file of tensors."""
    if not isinstance(value, str):
        return False
    return value.endswith((NPY, SAFETENSORS)) or REFERENCE.fullmatch(value) is not None


def _listed(value: Any, *, key: str, files: Files) -> list[Any]:
    if not isinstance(value, str | list) or not value:
        raise InvalidJob(f"{key}: expected files of shards, or a pattern of them, got {value!r}")
    found: list[Any] = []
    for index, entry in enumerate([value] if isinstance(value, str) else value):
        where = key if isinstance(value, str) else f"{key}[{index}]"
        if isinstance(entry, Mapping):
            found.append({n: tensor(entry[n], key=f"{where}.{n}", files=files) for n in entry})
            continue
        if not isinstance(entry, str):
            raise InvalidJob(f"{where}: expected a file, or {{argument = file}}, got {entry!r}")
        for name in files.matching(entry, key=where):
            found.append(files.tensors(name, key=where))
    return found
