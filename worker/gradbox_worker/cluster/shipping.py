"""What a machine that does not see the box's files is sent of them, and what comes back.

    models    what it lacks of their files, when a device starts
    inputs    the blobs of a job, and the result of the job that it goes on from; a device writes
              what it opens into a folder of its own
    results   of a job that it led, once it has ended

All of it goes by way of the object store, from the head's machine, which reads each file once.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy
import ray

from gradbox.protocol import names_in
from gradbox.tensors.safetensors_header import SafetensorsHeader
from gradbox_service.store import BlobStore, Room
from gradbox_service.store.files import lock_file, make_folder, put_in_place
from gradbox_worker.errors import DeviceNotStarted
from gradbox_worker.models import ModelEntry, read_models_file
from gradbox_worker.models.shipping import ShippedModels
from gradbox_worker.work import Work

PIECE_BYTES: Final = 64 * 2**20
PREFIX: Final = "gradbox-data"
MODELS: Final = "gradbox-models"
STARTING_S: Final = 60.0


@dataclass(frozen=True)
class ShippedInputs:
    """What a device of another machine needs of a job's files: references to their bytes.

    Attributes:
        blobs: by digest, those that are stored.
        earlier: of the result that the job goes on from, if it is still there.
        num_bytes: of all of them.
    """

    blobs: Mapping[str, Any]
    earlier: Any | None
    num_bytes: int

    @classmethod
    def of(cls, work: Work, blobs: BlobStore) -> ShippedInputs:
        """Read a job's files into the object store."""
        names = sorted(name for name in names_in(work.spec) if blobs.header(name) is not None)
        earlier, paths = work.earlier_result, [blobs.path(name) for name in names]
        put = {name: _put(path) for name, path in zip(names, paths, strict=True)}
        size_bytes = sum(path.stat().st_size for path in paths)
        if earlier is None or not earlier.exists():
            return cls(put, None, size_bytes)
        return cls(put, _put(earlier), size_bytes + earlier.stat().st_size)


class FetchedBlobs:
    """The blobs of one job on a machine that does not see the box's; see `Blobs`."""

    def __init__(self, shipped: ShippedInputs, store: BlobStore) -> None:
        """Fetch nothing yet.

        Args:
            store: of this device.
        """
        self._shipped, self._store = shipped, store

    def path(self, digest: str) -> Path:
        """Return where a blob is once its header was asked for."""
        return self._store.path(digest)

    def small(self, digest: str) -> bytes | None:
        """Return None: all blobs are files here."""
        return None

    def header(self, digest: str) -> SafetensorsHeader | None:
        """Fetch a blob, unless it is here, and return its header; None if the box has none.

        Raises:
            StorageFull: the disk of this machine does not hold it.
        """
        reference = self._shipped.blobs.get(digest)
        if reference is not None and not self._store.path(digest).exists():
            self._store.put(digest, [ray.get(reference).data])
        return self._store.header(digest)


class OwnFolder:
    """The folder in which a device has the files of its jobs that does not see the box's.

    Attributes:
        path: it stands for the box's data folder.
    """

    def __init__(self) -> None:
        """Make it, and remove those of devices that were killed.

        Raises:
            DeviceNotStarted: there is no place for it.
        """
        everywhere = _folder(PREFIX)
        long_ago_s = time.time() - STARTING_S
        for entry in everywhere.iterdir():
            if entry.stat().st_mtime > long_ago_s:
                continue  # it may be one that is made just now
            if (descriptor := lock_file(entry / "lock")) is not None:
                shutil.rmtree(entry, ignore_errors=True)
                os.close(descriptor)
        self.path = Path(tempfile.mkdtemp(dir=everywhere))
        (self.path / "lock").touch()
        self._lock = lock_file(self.path / "lock")

    def here(self, work: Work, shipped: ShippedInputs) -> Work:
        """Return a job as it is run here, with the result that it goes on from."""
        results = self.path / "results"
        earlier = None if work.earlier_result is None else results / work.earlier_result.name
        if earlier is not None and shipped.earlier is not None:
            make_folder(results)
            earlier.write_bytes(ray.get(shipped.earlier).data)
        result_path = results / work.result_path.name
        return replace(work, result_path=result_path, earlier_result=earlier)

    def blobs(self, shipped: ShippedInputs) -> FetchedBlobs:
        """Return the blobs of a job."""
        return FetchedBlobs(shipped, BlobStore(self.path))

    def clear(self) -> None:
        """Remove the files of jobs that have ended."""
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)


def fetch_result(actor: Any, work: Work) -> None:
    """Bring the result of a job that a device of another machine led to its place.

    Raises:
        StorageFull: the disk does not hold it.
        RayError: the device is lost.
    """
    room = Room(work.result_path.parent, work.disk_reserve_bytes)
    partial = work.result_path.with_suffix(".partial")
    make_folder(partial.parent)
    with room.noticing_a_full_disk(what="the result"), partial.open("wb") as file:
        while piece := ray.get(
            actor.compute.remote("read_result", work.result_path.name, file.tell())
        ).data:
            room.check(len(piece), what="the result")
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    put_in_place(partial, work.result_path)


class FilesToShip:
    """The models with all that they name, and those of the files that are in the object store."""

    def __init__(self, models_file: Path) -> None:
        """Read the models file.

        Raises:
            ModelsFileError: it cannot be read.
        """
        self.models = ShippedModels.of(read_models_file(models_file))
        self._references: dict[Path, Any] = {}

    def references(self, paths: Sequence[Path]) -> dict[Path, Any]:
        """Return references to the bytes of files, each of which is read once."""
        for path in paths:
            if path not in self.models.digests:
                raise PermissionError(f"expected one of the models' files, got {path}")
            if path not in self._references:
                self._references[path] = _put(path)
        return {path: self._references[path] for path in paths}


def lacking(shipped: ShippedModels) -> list[Path]:
    """Return the models' files that this machine has neither in their places nor from before."""
    return shipped.lacks(lambda: _folder(MODELS))


def models_here(shipped: ShippedModels, files: Mapping[Path, Any]) -> Mapping[str, ModelEntry]:
    """Return the models' entries as this machine builds them.

    Args:
        files: references to the bytes of those that it lacks.

    Raises:
        DeviceNotStarted: there is no place for them.
    """
    return shipped.here(lambda: _folder(MODELS), lambda path: ray.get(files[path]).data)


def _put(path: Path) -> Any:
    if path.stat().st_size == 0:
        return ray.put(numpy.zeros(0, dtype=numpy.uint8))
    mapped = numpy.memmap(path, dtype=numpy.uint8, mode="r")
    return ray.put(mapped.view(numpy.ndarray))


def _folder(prefix: str) -> Path:
    """Return this user's folder for models, or for jobs, which nobody else may write to.

    Raises:
        DeviceNotStarted: it belongs to somebody else.
    """
    folder = Path(tempfile.gettempdir()) / f"{prefix}-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        if folder.is_symlink() or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
            raise PermissionError("it is open to other users")
    except OSError as error:
        raise DeviceNotStarted(
            f"expected a folder of our own at {folder}, got: {error}; remove it"
        ) from error
    return folder
