"""Where the files of a box are under its data folder. Service and workers share that folder."""

from __future__ import annotations

from pathlib import Path

from gradbox_service.store.blobs import BlobStore
from gradbox_service.store.results import ResultStore


def blob_store(data: Path, *, reserve_bytes: int | None = None) -> BlobStore:
    """Return the blobs of the box whose data is in this folder; see `Room` for the reserve."""
    return BlobStore(data / "blobs", reserve_bytes=reserve_bytes)


def result_store(data: Path, *, reserve_bytes: int | None = None) -> ResultStore:
    """Return the results of the box whose data is in this folder; see `Room` for the reserve."""
    return ResultStore(data / "results", reserve_bytes=reserve_bytes)
