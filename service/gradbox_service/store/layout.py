"""Where the files of a box are under its data folder. Service and workers share that folder."""

from __future__ import annotations

from pathlib import Path

from gradbox_service.store.blobs import BlobStore
from gradbox_service.store.results import ResultStore


def blob_store(data: Path) -> BlobStore:
    """Return the blobs of the box whose data is in this folder."""
    return BlobStore(data / "blobs")


def result_store(data: Path) -> ResultStore:
    """Return the results of the box whose data is in this folder."""
    return ResultStore(data / "results")
