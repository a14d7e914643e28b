"""Blobs and results on the box's disk. Nothing here knows HTTP or Redis."""

from gradbox_service.store.blobs import BlobStore, Upload
from gradbox_service.store.layout import blob_store, result_store
from gradbox_service.store.results import ResultStore
from gradbox_service.store.room import Room

__all__ = ["BlobStore", "ResultStore", "Room", "Upload", "blob_store", "result_store"]
