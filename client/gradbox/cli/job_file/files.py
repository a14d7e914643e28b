"""The files that a job file names: tensors and Python functions."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError, safe_open

from gradbox.errors import InvalidJob
from gradbox.inputs.shards import natural
from gradbox.tensors.safetensors_header import other_format
from gradbox.tensors.tensor_bytes import is_torch_importable

NPY: Final = ".npy"
SAFETENSORS: Final = ".safetensors"
GLOB: Final = re.compile(r"[*?\[]")
# FILE.safetensors:NAME
REFERENCE: Final = re.compile(r"(?P<file>.+\.safetensors):(?P<name>.+)")


@dataclass(frozen=True)
class Files:
    """The files of one job, relative to the folder of its job file."""

    folder: Path

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

    def matching(self, text: str, *, key: str) -> list[str]:
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
        file, colon, name = text.rpartition(":")
        if not colon or not file.endswith(".py"):
            raise InvalidJob(f"{key}: expected file.py:function, got {text!r}")
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
