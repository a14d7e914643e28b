"""A job as a TOML file beside the files that it names: what `gradbox submit` reads.

Its keys are the arguments of a computation, and the computation says what it expects of them. What
TOML cannot hold stands in files, relative to the folder of the job file:

    FILE.npy, FILE.safetensors:NAME        a tensor, or {file = …, requires_grad = true}
    FILE.py:NAME                           a function, or an instance of a class

Such strings are read wherever a tensor or a function may stand, in tables and lists too. Whole
files of tensors are shards in `inputs`, and a state dict in `weights`. An error begins with the
path of its key: `loss_inputs.labels: expected …, got …`.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError, safe_open

from gradbox.computations import (
    Builtin,
    Computation,
    Cotangents,
    Forward,
    Gradient,
    HessianProduct,
    InverseHessian,
    Jacobian,
    MixedGradient,
    Penalty,
    PerSampleGradient,
)
from gradbox.errors import InvalidJob
from gradbox.inputs.shards import natural
from gradbox.tensors.safetensors_header import other_format
from gradbox.tensors.tensor_bytes import is_torch_importable
from gradbox.written_files import read_written

KINDS: Final[Mapping[str, type[Computation]]] = {
    "gradient": Gradient,
    "forward": Forward,
    "per_sample_gradient": PerSampleGradient,
    "jacobian": Jacobian,
    "mixed_gradient": MixedGradient,
    "hessian_product": HessianProduct,
    "inverse_hessian": InverseHessian,
}
# Keys under which strings may name tensors and functions.
READ: Final = frozenset(
    {"loss", "loss_inputs", "penalties", "readout", "inner", "outer", "x", "y", "order", "vectors"}
)
NPY: Final = ".npy"
SAFETENSORS: Final = ".safetensors"
GLOB: Final = re.compile(r"[*?\[]")
# FILE.safetensors:NAME
REFERENCE: Final = re.compile(r"(?P<file>.+\.safetensors):(?P<name>.+)")
FUNCTION: Final = re.compile(r".+\.py:\w+")


@dataclass(frozen=True)
class Again:
    """A job that the box has, once more; `changes` are options in place of its own."""

    job: str
    changes: Mapping[str, Any]


def read_job(path: Path) -> Computation | Again:
    """Read a job file and the files that it names; `again = "ID"` in one names a job of the box.

    Raises:
        InvalidJob: it is no job; the message names the file and the key.
    """
    try:
        document = tomllib.loads(read_written(path))
    except OSError as error:
        raise InvalidJob(f"{path}: expected a job file, got: {error.strerror}") from None
    except ValueError as error:
        raise InvalidJob(f"{path}: expected TOML, got: {error}") from None
    if "again" in document:
        return Again(str(document.pop("again")), document)
    try:
        return _computation(document, files=Files(path.parent))
    except InvalidJob as error:
        error.args = (f"{path}: {error}",)
        raise
    except TypeError as error:  # of a constructor, which names the key that it does not take
        raise InvalidJob(f"{path}: {error}") from None


def _computation(document: dict[str, Any], *, files: Files) -> Computation:
    kind = document.pop("computation", "gradient")
    if kind not in KINDS:
        raise InvalidJob(f"computation: expected one of {', '.join(KINDS)}, got {kind!r}")
    given = {
        name: files.read(value, key=name) if name in READ else value
        for name, value in document.items()
    }
    if "inputs" in given:
        given["inputs"] = _inputs(given["inputs"], files)
    if "weights" in given:
        given["weights"] = _weights(given["weights"], files)
    if "loss" in given:
        given["loss"] = _loss(given["loss"])
    if isinstance(given.get("penalties"), list):
        given["penalties"] = [
            Penalty(**term) if isinstance(term, dict) else term for term in given["penalties"]
        ]
    return KINDS[kind](**given)


def _inputs(value: Any, files: Files) -> Any:
    """Read files and patterns of them, {argument: file} tables, or a table of groups of those."""
    if isinstance(value, dict):
        return {name: files.shards(value[name], key=f"inputs.{name}") for name in value}
    return files.shards(value, key="inputs")


def _weights(value: Any, files: Files) -> Any:
    """Read a .safetensors file, or a table of tensors by name."""
    if isinstance(value, str):
        return files.tensors(value, key="weights")
    return files.read(value, key="weights")


def _loss(value: Any) -> Any:
    """Return what a loss is: a function, a built-in one by its name, or a table that says which."""
    if isinstance(value, str):
        return Builtin(value)
    if not isinstance(value, dict):
        return value
    kinds = [kind for kind in ("builtin", "function", "cotangents") if kind in value]
    if len(kinds) != 1:
        raise InvalidJob(f"loss: expected one of builtin, function and cotangents, got {[*value]}")
    main, given = value[kinds[0]], {n: v for n, v in value.items() if n != kinds[0]}
    if kinds[0] == "builtin":
        return Builtin(main, **given)
    if kinds[0] == "cotangents":
        return Cotangents(main, **given)
    if given:
        raise InvalidJob(f"loss: expected nothing beside function, got {[*given]}")
    return main


@dataclass(frozen=True)
class Files:
    """The files of one job, relative to the folder of its job file."""

    folder: Path

    def read(self, value: Any, *, key: str) -> Any:
        """Return a value with what its strings name in their places; other strings stay.

        Raises:
            InvalidJob: a file is not there, or does not hold what it is said to.
        """
        if isinstance(value, list):
            return [self.read(entry, key=f"{key}[{at}]") for at, entry in enumerate(value)]
        if isinstance(value, dict):
            found = {name: self.read(entry, key=f"{key}.{name}") for name, entry in value.items()}
            return _trainable(found, key=key) if "file" in value else found
        if not isinstance(value, str):
            return value
        if value.endswith((NPY, SAFETENSORS)) or REFERENCE.fullmatch(value):
            return self.tensor(value, key=key)
        return self.function(value, key=key) if FUNCTION.fullmatch(value) else value

    def shards(self, value: Any, *, key: str) -> list[Any]:
        """Return the shards of one group: whole files, or tables of tensors by argument.

        Raises:
            InvalidJob: as for `read`.
        """
        if not isinstance(value, str | list) or not value:
            raise InvalidJob(f"{key}: expected files of shards, or a pattern, got {value!r}")
        found: list[Any] = []
        for index, entry in enumerate([value] if isinstance(value, str) else value):
            where = key if isinstance(value, str) else f"{key}[{index}]"
            if isinstance(entry, str):
                found += [self.tensors(n, key=where) for n in self._matching(entry, key=where)]
            elif isinstance(entry, dict):
                found.append(self.read(entry, key=where))
            else:
                raise InvalidJob(f"{where}: expected a file, or {{argument = file}}, got {entry!r}")
        return found

    def tensors(self, text: str, *, key: str) -> dict[str, Any]:
        """Return the tensors of a file: the named ones of a .safetensors, or {"0": a .npy's}.

        Raises:
            InvalidJob: there is no such file, or it holds no tensors.
        """
        path = self._existing(text, key=key)
        if path.suffix == NPY:
            return {"0": self._array(path, key=key)}
        if path.suffix != SAFETENSORS:
            raise InvalidJob(f"{key}: expected a {SAFETENSORS} or a {NPY} file, got {text!r}")
        framework = "pt" if is_torch_importable() else "np"
        try:
            with safe_open(path, framework=framework) as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, TypeError) as error:
            need = "" if framework == "pt" else " (bfloat16 and float8 need torch on this machine)"
            got = other_format(path) or f"{error}{need}"
            raise InvalidJob(f"{key}: expected safetensors in {path}, got {got}") from None
        if not found:
            raise InvalidJob(f"{key}: expected tensors in {path}, found none")
        return found

    def tensor(self, text: str, *, key: str) -> Any:
        """Return the one tensor that FILE.npy, FILE.safetensors or FILE.safetensors:NAME means.

        Raises:
            InvalidJob: it means none, or several.
        """
        reference = REFERENCE.fullmatch(text)
        found = self.tensors(reference["file"] if reference else text, key=key)
        if reference is None:
            if len(found) > 1:
                raise InvalidJob(
                    f"{key}: expected one tensor, got {text}, which holds {sorted(found)[:10]}: "
                    f"write {text}:NAME"
                )
            return next(iter(found.values()))
        if reference["name"] not in found:
            raise InvalidJob(
                f"{key}: expected a tensor of {reference['file']}, which holds "
                f"{sorted(found)[:10]}, got {reference['name']!r}"
            )
        return found[reference["name"]]

    def _matching(self, text: str, *, key: str) -> list[str]:
        """Return the files that a pattern such as shards/*.npy names, numbers in order of size.

        Raises:
            InvalidJob: there is none.
        """
        if not GLOB.search(text):
            return [text]
        folder = self.folder if not Path(text).is_absolute() else Path("/")
        paths = sorted(folder.glob(text.lstrip("/")), key=lambda path: natural(str(path)))
        if not paths:
            raise InvalidJob(f"{key}: expected files, found none that match {folder / text}")
        return [str(path) for path in paths]

    def function(self, text: str, *, key: str) -> Any:
        """Return what file.py:NAME names; of a class, an instance.

        Raises:
            InvalidJob: there is no such file, or it has no such name.
        """
        file, _, name = text.rpartition(":")
        path = self._existing(file, key=key)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None  # for a .py file there always is one
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent))  # for what it imports from beside it
        try:
            spec.loader.exec_module(module)
        except ModuleNotFoundError as error:
            extra = ": pip install 'gradbox[torch]'" if error.name == "torch" else ""
            raise InvalidJob(
                f"{key}: {path} imports {error.name}, which is not installed here{extra}"
            ) from None
        except SyntaxError as error:
            raise InvalidJob(f"{key}: {path} is no Python: {error}") from None
        finally:
            sys.path.remove(str(path.parent))
        if not hasattr(module, name):
            raise InvalidJob(f"{key}: expected {name!r} in {path}, which does not define it")
        found = getattr(module, name)
        return found() if isinstance(found, type) else found

    def _array(self, path: Path, *, key: str) -> np.ndarray[Any, Any]:
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
        except (ValueError, EOFError) as error:
            raise InvalidJob(f"{key}: {path} cannot be read: {error}") from None

    def _existing(self, text: str, *, key: str) -> Path:
        path = self.folder / Path(text).expanduser()
        if not path.is_file():
            raise InvalidJob(f"{key}: expected a file, found none at {path}")
        return path


def _trainable(table: dict[str, Any], *, key: str) -> Any:
    """Return the tensor of {file, requires_grad}."""
    if not table.keys() <= {"file", "requires_grad"} or isinstance(table["file"], str):
        raise InvalidJob(
            f"{key}: expected file = FILE.npy or FILE.safetensors:NAME, and requires_grad, got "
            f"{[*table]}"
        )
    found = table["file"]
    if table.get("requires_grad") is not True:
        return found
    import torch

    # torch.tensor copies without a warning what a .npy maps and nobody may write.
    copied = found.clone() if isinstance(found, torch.Tensor) else torch.tensor(found)
    return copied.requires_grad_()
