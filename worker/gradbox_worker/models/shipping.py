"""The files that models are built from, on their way to a machine that may not have them.

A machine that finds a model's files where its owner named them, with the same bytes, uses those.
For another one they are fetched, and laid into a folder of its own:

    FOLDER/ENTRY/file.py        the file of a `python` source
    FOLDER/ENTRY/model/…        the folder of an `hf` source
    FOLDER/ENTRY/*.safetensors  weights

Hub names, and functions of packages, are the machine's own business: they are downloaded there, or
have to be installed. Whatever a machine builds, its version is compared with the other machines'.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from gradbox_service.store.files import write_whole
from gradbox_worker.models.models_file import ModelEntry

MODEL: Final = "model"
FILE_SUFFIX: Final = ".py"

Fetch = Callable[[Path], Any]
"""Returns the bytes of a file of the machine that ships, as a buffer."""


@dataclass(frozen=True)
class ShippedModels:
    """The entries of a models file, and the SHA-256 of every file that they name."""

    entries: Mapping[str, ModelEntry]
    digests: Mapping[Path, str]

    @classmethod
    def of(cls, entries: Mapping[str, ModelEntry]) -> ShippedModels:
        """Look at the files that are there; what is not is told by who builds the model."""
        paths = {path for entry in entries.values() for path in _files_of(entry)}
        return cls(dict(entries), {path: _digest(path) for path in sorted(paths)})

    def here(self, folder: Callable[[], Path], fetch: Fetch) -> dict[str, ModelEntry]:
        """Return the entries as this machine builds them, with files fetched that it lacks.

        Args:
            folder: makes the one for what is fetched, called where this machine lacks a file; what
                lies there from an earlier call is used again.
        """
        return {
            name: self._entry_here(entry, folder, fetch) for name, entry in self.entries.items()
        }

    def lacks(self, folder: Callable[[], Path]) -> list[Path]:
        """Return the files that `here` would fetch."""
        missing = []
        for entry in self.entries.values():
            named = list(self._named(entry))
            if not all(_is(path, self.digests[path]) for path, _ in named):
                own = folder() / entry.name
                missing += [path for path, at in named if not _is(own / at, self.digests[path])]
        return missing

    def _entry_here(
        self, entry: ModelEntry, folder: Callable[[], Path], fetch: Fetch
    ) -> ModelEntry:
        named = list(self._named(entry))
        if all(_is(path, self.digests[path]) for path, _ in named):
            return entry
        own = folder() / entry.name
        for path, place in named:
            target = own / place
            if not _is(target, self.digests[path]):
                target.parent.mkdir(parents=True, exist_ok=True)
                write_whole(target, fetch(path))
        source, weights = entry.source, entry.weights
        if (file := _source_file(entry)) is not None:
            source = f"{file.name}:{entry.source.rpartition(':')[2]}"
        elif _source_folder(entry) in {parent for path, _ in named for parent in path.parents}:
            source = MODEL
        if weights is not None:
            weights = own / weights.name
        return replace(entry, folder=own, source=source, weights=weights)

    def _named(self, entry: ModelEntry) -> Iterator[tuple[Path, Path]]:
        """Return the files of an entry, as on the machine that ships, and their places here."""
        model = _source_folder(entry)
        for path in self.digests:
            if path in (_source_file(entry), entry.weights):
                yield path, Path(path.name)
            elif model is not None and model in path.parents:
                yield path, MODEL / path.relative_to(model)


def _files_of(entry: ModelEntry) -> Iterator[Path]:
    """Return the files that an entry names and that are there."""
    model = _source_folder(entry)
    inside = sorted(model.rglob("*")) if model is not None else []
    for path in (_source_file(entry), entry.weights, *inside):
        if path is not None and path.is_file():
            yield path


def _source_file(entry: ModelEntry) -> Path | None:
    place = entry.source.rpartition(":")[0]
    if entry.builder != "python" or not place.endswith(FILE_SUFFIX):
        return None
    return entry.folder / Path(place).expanduser()


def _source_folder(entry: ModelEntry) -> Path | None:
    return entry.folder / Path(entry.source).expanduser() if entry.builder == "hf" else None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is(path: Path, digest: str) -> bool:
    return path.is_file() and _digest(path) == digest
