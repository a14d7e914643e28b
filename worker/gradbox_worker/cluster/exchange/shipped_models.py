"""Models on a machine that is not the box's: what it lacks of their files comes from the head.

The pool, on the head's machine, reads a file when the first device asks for it, into the object
store, where devices that start together find it.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import ray

from gradbox_worker.errors import DeviceNotStarted
from gradbox_worker.models import ModelEntry, read_models_file
from gradbox_worker.models.shipping import ShippedModels


class FilesToShip:
    """A models file with all that it names, and those of the files that are in the object store."""

    def __init__(self, models_file: Path) -> None:
        """Read nothing yet."""
        self._models_file = models_file
        self._shipped: asyncio.Task[ShippedModels] | None = None
        self._references: dict[Path, asyncio.Task[Any]] = {}

    async def models(self) -> ShippedModels:
        """Return the models as they are.

        Raises:
            ModelsFileError: the file cannot be read.
        """
        if self._shipped is None:
            look = asyncio.to_thread(lambda: ShippedModels.of(read_models_file(self._models_file)))
            self._shipped = asyncio.create_task(look)
        return await self._shipped

    async def reference(self, path: Path) -> Any:
        """Return a reference to a file's bytes.

        Raises:
            PermissionError: it is none of the models' files.
        """
        if path not in (await self.models()).digests:
            raise PermissionError(f"expected one of the models' files, got {path}")
        if path not in self._references:
            self._references[path] = asyncio.create_task(asyncio.to_thread(_put, path))
        return await self._references[path]

    def forget(self) -> None:
        """Let the object store drop files that nobody reads, and look at them anew when asked."""
        self._shipped = None
        self._references.clear()


def models_here(pool: Any) -> Mapping[str, ModelEntry]:
    """Return the models' entries as this machine builds them, fetching what it lacks.

    Args:
        pool: the actor that has the files.

    Raises:
        DeviceNotStarted: there is no place for them.
    """

    def fetch(path: Path) -> Any:
        (reference,) = ray.get(pool.model_file.remote(path))
        return ray.get(reference).data

    shipped: ShippedModels = ray.get(pool.models.remote())
    return shipped.here(_folder, fetch)


def _put(path: Path) -> Any:
    if path.stat().st_size == 0:
        return ray.put(numpy.zeros(0, dtype=numpy.uint8))
    mapped = numpy.memmap(path, dtype=numpy.uint8, mode="r")
    return ray.put(mapped.view(numpy.ndarray))


def _folder() -> Path:
    """Return this user's folder for models, which nobody else may write to.

    Raises:
        DeviceNotStarted: it belongs to somebody else.
    """
    folder = Path(tempfile.gettempdir()) / f"gradbox-models-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        if folder.is_symlink() or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
            raise PermissionError("it is open to other users")
    except OSError as error:
        raise DeviceNotStarted(
            f"expected a folder of our own at {folder} for the models' files, got: {error}; "
            f"remove it"
        ) from error
    return folder
