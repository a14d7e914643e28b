"""Blobs and results on the box's disk. Nothing here knows HTTP or Redis."""

from gradbox_service.store.blobs import BlobStore, Upload
from gradbox_service.store.layout import blob_store, result_store
from gradbox_service.store.results import ResultStore

__all__ = ["BlobStore", "ResultStore", "Upload", "blob_store", "result_store"]
